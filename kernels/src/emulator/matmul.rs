//! Matrix products on the host, as plain as they can be: each element is one chain of fused multiply-adds.

use crate::backend::Output;
use crate::gpu::driver::{Bias, ElementKind, MatrixProduct, Operand};

/// Computes `product`, of a batch one entry after the other.
///
/// # Safety
/// As for [`Driver::matmul`](crate::gpu::Driver::matmul); the memory is live.
pub(super) unsafe fn matmul(product: MatrixProduct) {
    for entry in product.each() {
        // SAFETY: the caller's promise.
        unsafe { form(entry) };
    }
}

/// # Safety
/// The operands must lie inside live memory, and `out` must overlap neither `a` nor `b`.
unsafe fn form(product: MatrixProduct) {
    let MatrixProduct { out, a, b, m, n, k, output, base, bias, .. } = product;
    let base = Operand { address: base, ..out };
    let bias = bias.map(|Bias { address, element }| Operand { address, element, ..out });
    for row in 0..m {
        for column in 0..n {
            let mut sum = 0.0_f32;
            for term in 0..k {
                // SAFETY: rows, columns and terms lie inside the operands.
                let (left, right) = unsafe { (read(a, row, term), read(b, term, column)) };
                sum = left.mul_add(right, sum);
            }
            // SAFETY: the element lies inside `out`, `base` and the bias.
            unsafe {
                if output == Output::Add {
                    sum += read(base, row, column);
                }
                if let Some(bias) = bias {
                    sum += read(bias, 0, column);
                }
                write(out, row, column, sum);
            }
        }
    }
}

fn place(operand: Operand, row: usize, column: usize) -> u64 {
    let element = match operand.transposed {
        true => column * operand.stride + row,
        false => row * operand.stride + column,
    };
    operand.address.0 + (element * operand.element.bytes()) as u64
}

/// # Safety
/// The element must lie inside the operand.
unsafe fn read(operand: Operand, row: usize, column: usize) -> f32 {
    let at = place(operand, row, column);
    // SAFETY: the caller guarantees the validity of the element, and elements are aligned.
    unsafe {
        match operand.element {
            ElementKind::F32 => *(at as *const f32),
            ElementKind::Bf16 => (*(at as *const half::bf16)).to_f32(),
        }
    }
}

/// # Safety
/// The element must lie inside the operand, which nothing else views.
unsafe fn write(operand: Operand, row: usize, column: usize, value: f32) {
    let at = place(operand, row, column);
    // SAFETY: as in `read`.
    unsafe {
        match operand.element {
            ElementKind::F32 => *(at as *mut f32) = value,
            ElementKind::Bf16 => *(at as *mut half::bf16) = half::bf16::from_f32(value),
        }
    }
}
