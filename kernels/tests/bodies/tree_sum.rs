//! Sums along a tree.

use tidemill_kernels::MemoryPlace;
use tidemill_kernels::backend::{TermValues, TreeSum, TreeTerm};
use tidemill_kernels::reference::gradient_sums;
use tidemill_kernels::{Backend, Slice, SliceMut};

use super::agreement::{Transcript, assert_close, assert_same_bits, tolerance};
use super::arm::Arm;
use super::device::{Device, Layout, MARGINS, Placed, assert_shape_error};
use super::inputs::{Inputs, wide};

/// Sizes around a vector's width and a block's share, and one that takes several rounds of all blocks.
const SIZES: [usize; 8] = [1, 3, 16, 17, 2047, 2049, 8193, 600_001];

/// The joins of trees: complete ones, those of five, six and seven leaves, chains to either side, and the most leaves of a launch.
fn trees() -> Vec<Vec<usize>> {
    let whole = |leaves: u32| (0..leaves).map(|leaf| leaf.trailing_ones() as usize).collect();
    let left = |leaves: usize| (0..leaves).map(|leaf| usize::from(leaf > 0)).collect();
    let right = |leaves: usize| {
        (0..leaves).map(|leaf| if leaf + 1 == leaves { leaves - 1 } else { 0 }).collect()
    };
    vec![
        vec![0],
        whole(2),
        whole(4),
        whole(8),
        whole(32),
        vec![0, 1, 0, 2, 1],
        vec![0, 0, 1, 1, 0, 3],
        vec![0, 1, 1, 0, 1, 0, 3],
        left(3),
        right(3),
        left(17),
        right(12),
    ]
}

/// The sum by the definition, on the host.
fn sum_of(values: &[Vec<f32>], joins: &[usize]) -> Vec<f32> {
    let mut sums: Vec<Vec<f32>> = Vec::new();
    for (values, &joins) in values.iter().zip(joins) {
        sums.push(values.clone());
        for _ in 0..joins {
            let right = sums.pop().unwrap();
            let left = sums.last_mut().unwrap();
            left.iter_mut().zip(&right).for_each(|(left, right)| *left += right);
        }
    }
    sums.pop().unwrap()
}

/// Terms are added along the tree, to the bit, whether the sum has memory of its own or replaces a term.
pub fn agrees<B: Backend>(arm: &Arm<B>) -> Transcript {
    let backend = &arm.backend;
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let on_host = backend.memory() == MemoryPlace::Host;
    for (case, joins) in trees().iter().enumerate() {
        let terms = joins.len();
        let largest = if terms > 8 { SIZES.len() - 1 } else { SIZES.len() };
        for elements in SIZES[..largest].iter().copied() {
            device.margin = MARGINS[(case + elements) % 2];
            let label = format!("tree_sum {elements} elements by {joins:?}");
            let mut inputs = Inputs::new((elements * 64 + case) as u64);
            let values: Vec<Vec<f32>> =
                (0..terms).map(|_| inputs.uniform(elements, -1.0, 1.0)).collect();
            let placed: Vec<Placed<B>> = values
                .iter()
                .map(|values| Placed::new(&mut device, Layout::range(elements), values))
                .collect();
            let expected = sum_of(&values, joins);
            let wide_values: Vec<Vec<f64>> = values.iter().map(|values| wide(values)).collect();
            let wide_terms: Vec<&[f64]> = wide_values.iter().map(Vec::as_slice).collect();
            let definition = gradient_sums::tree_sum(&wide_terms);
            for in_place in [None, Some(case * elements % terms)] {
                let mut out = match in_place {
                    Some(at) => Placed::new(&mut device, Layout::range(elements), &values[at]),
                    None => Placed::poisoned(&mut device, Layout::range(elements)),
                };
                let mut terms = Vec::new();
                for (at, (placed, &joins)) in placed.iter().zip(joins).enumerate() {
                    // Every third term is in the host's memory, if buffers are.
                    let is_on_host = on_host && at % 3 == 2;
                    let values = match in_place {
                        Some(place) if place == at => TermValues::Out,
                        _ if is_on_host => TermValues::Host(&values[at]),
                        _ => TermValues::Buffer(placed.slice()),
                    };
                    terms.push(TreeTerm { values, joins });
                }
                backend.tree_sum(&mut device.stream, out.slice_mut(), &terms).expect(&label);
                let found = out.read(&mut device);
                assert_close(&label, &found, &definition, tolerance::<f32>(joins.len()));
                assert_same_bits(&label, &found, &expected);
                if in_place.is_none() {
                    transcript.record(&label, &found);
                }
            }
        }
    }
    transcript
}

/// Sums computed by one call equal sums computed one by one: of different sizes and trees, more than a launch takes, one in
/// place of a term, and copies among them.
pub fn several_at_once_agree<B: Backend>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let whole = |leaves: u32| -> Vec<usize> {
        (0..leaves).map(|leaf| leaf.trailing_ones() as usize).collect()
    };
    for (case, of_each) in [
        // More sums of one kernel than a launch takes.
        vec![(whole(2), 8193); 19],
        // Sizes of several tiles, and of less than a tile.
        [1, 70_001, 5, 600_001, 2047, 4096, 33].map(|elements| (whole(2), elements)).to_vec(),
        // Neighbouring sums of different kernels, and copies.
        vec![
            (whole(2), 2049),
            (vec![0], 77),
            (whole(4), 9000),
            (whole(4), 3),
            (vec![0, 1, 0, 2, 1], 5000),
            (vec![0, 1, 1], 16_385),
            (whole(8), 4097),
            (whole(2), 17),
        ],
    ]
    .into_iter()
    .enumerate()
    {
        device.margin = MARGINS[case % 2];
        let mut inputs = Inputs::new(case as u64 + 900);
        let mut values: Vec<Vec<Vec<f32>>> = Vec::new();
        for (joins, elements) in &of_each {
            let mut term = || inputs.uniform(*elements, -1.0, 1.0);
            values.push(joins.iter().map(|_| term()).collect());
        }
        let placed: Vec<Vec<Placed<B>>> = values
            .iter()
            .map(|terms| {
                let mut place =
                    |term: &Vec<f32>| Placed::new(&mut device, Layout::range(term.len()), term);
                terms.iter().map(&mut place).collect()
            })
            .collect();
        // Every third sum takes the place of its first term.
        let in_place = |sum: usize| sum % 3 == 1;
        let mut outs: Vec<Placed<B>> = of_each
            .iter()
            .enumerate()
            .map(|(sum, (_, elements))| match in_place(sum) {
                true => Placed::new(&mut device, Layout::range(*elements), &values[sum][0]),
                false => Placed::poisoned(&mut device, Layout::range(*elements)),
            })
            .collect();
        let mut sums = Vec::new();
        for (sum, (out, (joins, _))) in outs.iter_mut().zip(&of_each).enumerate() {
            let mut terms = Vec::new();
            for (at, (placed, &joins)) in placed[sum].iter().zip(joins).enumerate() {
                let values = match at == 0 && in_place(sum) {
                    true => TermValues::Out,
                    false => TermValues::Buffer(placed.slice()),
                };
                terms.push(TreeTerm { values, joins });
            }
            sums.push(TreeSum { out: out.slice_mut(), terms });
        }
        arm.backend.tree_sums(&mut device.stream, sums).expect("several sums");
        for (sum, (out, (joins, elements))) in outs.iter_mut().zip(&of_each).enumerate() {
            let label = format!("sum {sum} of {}: {elements} elements by {joins:?}", of_each.len());
            let found = out.read(&mut device);
            assert_same_bits(&label, &found, &sum_of(&values[sum], joins));
            transcript.record(&label, &found);
        }
    }
    transcript
}

/// If one of several sums is wrong, none is written.
pub fn one_wrong_tree_of_several_stops_all<B: Backend>(arm: &Arm<B>) {
    let mut device = Device::new(arm);
    let (mut right, mut wrong) = (device.upload(&[7.0_f32; 5]), device.upload(&[7.0_f32; 5]));
    let term = device.upload(&[1.0_f32; 5]);
    let of = |joins| TreeTerm { values: TermValues::Buffer(Slice::all(&term)), joins };
    let sums = vec![
        TreeSum { out: SliceMut::all(&mut right), terms: vec![of(0), of(1)] },
        TreeSum { out: SliceMut::all(&mut wrong), terms: vec![of(0), of(0)] },
    ];
    assert_shape_error("the second", arm.backend.tree_sums(&mut device.stream, sums));
    for out in [right, wrong] {
        assert_eq!(device.download(&out), [7.0; 5]);
    }
}

/// Terms that do not form a tree, or differ in length, are refused before anything is written.
pub fn wrong_trees_are_refused<B: Backend>(arm: &Arm<B>) {
    let backend = &arm.backend;
    let mut device = Device::new(arm);
    let mut out = device.upload(&[7.0_f32; 5]);
    let [five, four] = [device.upload(&[1.0_f32; 5]), device.upload(&[1.0_f32; 4])];
    for (what, terms) in [
        ("no terms", vec![]),
        ("two sums are left", vec![(Some(&five), 0), (Some(&five), 0)]),
        ("a join too many", vec![(Some(&five), 0), (Some(&five), 2)]),
        ("a join of nothing", vec![(Some(&five), 1)]),
        ("out twice", vec![(None, 0), (None, 1)]),
        ("a short term", vec![(Some(&five), 0), (Some(&four), 1)]),
    ] {
        let terms: Vec<TreeTerm<'_, B>> = terms
            .into_iter()
            .map(|(values, joins)| {
                let values = values.map_or(TermValues::Out, |v| TermValues::Buffer(Slice::all(v)));
                TreeTerm { values, joins }
            })
            .collect();
        let out = SliceMut::all(&mut out);
        assert_shape_error(what, backend.tree_sum(&mut device.stream, out, &terms));
    }
    // Memory of the host is read in place or refused, and never read past its end.
    for (elements, is_right) in [(5, backend.memory() == MemoryPlace::Host), (4, false)] {
        let (host, values) = ([0.0; 5], TermValues::Buffer(Slice::all(&five)));
        let host = TreeTerm { values: TermValues::Host(&host[..elements]), joins: 1 };
        let terms = [TreeTerm { values, joins: 0 }, host];
        let mut other = device.upload(&[7.0_f32; 5]);
        let out = SliceMut::all(&mut other);
        let summed = backend.tree_sum(&mut device.stream, out, &terms);
        match is_right {
            true => summed.expect("the host's memory is this device's"),
            false => assert_shape_error("memory of the host", summed),
        }
    }
    assert_eq!(device.download(&out), [7.0; 5]);
}
