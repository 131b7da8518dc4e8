//! What a processor gives at present: GFLOP/s a core of `matrixmultiply`'s sgemm, 1024 x 1024 x 1024, on as many threads as the
//! argument says (one without).
//!
//! Rates of training on a machine that others share mean little without it: `cargo run --release -p tidemill-kernels --example
//! calibration 2` before and after.

use std::time::Instant;

const SIZE: usize = 1024;
const PRODUCTS: usize = 12;

/// The median of a thread's products.
fn gigaflops() -> f64 {
    let [a, b] = [0.5_f32, 0.25].map(|x| vec![x; SIZE * SIZE]);
    let mut out = vec![0.0_f32; SIZE * SIZE];
    let stride = SIZE as isize;
    let mut rates: Vec<f64> = (0..PRODUCTS)
        .map(|_| {
            let start = Instant::now();
            // SAFETY: all three are SIZE x SIZE, row by row.
            unsafe {
                matrixmultiply::sgemm(
                    SIZE,
                    SIZE,
                    SIZE,
                    1.0,
                    a.as_ptr(),
                    stride,
                    1,
                    b.as_ptr(),
                    stride,
                    1,
                    0.0,
                    out.as_mut_ptr(),
                    stride,
                    1,
                );
            }
            2e-9 * SIZE.pow(3) as f64 / start.elapsed().as_secs_f64()
        })
        .collect();
    assert_eq!(out[0], 0.125 * SIZE as f32, "a product that is wrong");
    rates.sort_by(f64::total_cmp);
    rates[PRODUCTS / 2]
}

fn main() -> Result<(), String> {
    let threads = match std::env::args().nth(1) {
        None => 1,
        Some(given) => match given.parse() {
            Ok(threads @ 1..) => threads,
            _ => return Err(format!("expected a number of threads, found {given}")),
        },
    };
    let running: Vec<_> = (0..threads).map(|_| std::thread::spawn(gigaflops)).collect();
    let rates: Vec<f64> = running.into_iter().filter_map(|thread| thread.join().ok()).collect();
    if rates.len() < threads {
        return Err("a thread panicked".to_owned());
    }
    println!("{:.0}", rates.iter().sum::<f64>() / threads as f64);
    Ok(())
}
