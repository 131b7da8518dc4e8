//! Sums along a binary tree.

use bytemuck::{Pod, Zeroable};

use super::exactly;
use super::sizes::{Access, WIDE_BYTES, blocks};
use crate::backend::{
    self, MOST_TREE_TERMS, TermValues, TreeSum as TreeSumOf, TreeTerm, check_tree,
};
use crate::error::{KernelError, Result};
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Driver};
use crate::gpu::precision::Precision;
use crate::gpu::source::TREE_SUM;
use crate::gpu::{Gpu, GpuStream};

const KERNEL: &str = "tree_sum";
const THREADS: u32 = 512;
/// The most sums of a launch.
const SUMS: usize = 8;
const TERMS: usize = MOST_TREE_TERMS;
/// The most sums that wait at once.
const WAITING: usize = 12;
/// The most blocks of a launch: as many as a link between devices keeps busy, so that others can compute meanwhile.
const BLOCKS: usize = 64;

/// `TreeSum` of tree_sum.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct TreeSum {
    out: Address,
    terms: [Address; TERMS],
    elements: u64,
    term_count: u32,
    joins: [u8; TERMS],
    padding: [u8; 4],
}

/// `TreeSums` of tree_sum.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct TreeSums {
    sums: [TreeSum; SUMS],
    count: u32,
    padding: [u8; 4],
}

/// The kernels of a tree, with wide loads and without, and how many packs a thread has at once.
fn variant(joins: &[u8]) -> ([&'static str; 2], usize) {
    // In a whole tree over a power of two of terms, the joins of a term are the trailing ones of
    // its number.
    let is_whole = joins.len().is_power_of_two()
        && joins.iter().enumerate().all(|(term, &joins)| joins as u32 == term.trailing_ones());
    match joins.len() {
        2 if is_whole => (["tree_sum_of_2_wide", "tree_sum_of_2_single"], 4),
        4 if is_whole => (["tree_sum_of_4_wide", "tree_sum_of_4_single"], 2),
        8 if is_whole => (["tree_sum_of_8_wide", "tree_sum_of_8_single"], 1),
        _ => (["tree_sum_of_any_wide", "tree_sum_of_any_single"], 1),
    }
}

/// A launch: the arguments, the name of the kernel, and the tiles that it sums.
struct Prepared {
    arguments: TreeSum,
    kernel: &'static str,
    tiles: usize,
}

fn prepared<D: Driver, P: Precision>(sum: &TreeSumOf<'_, Gpu<D, P>>) -> Result<Prepared> {
    let TreeSumOf { out, terms } = sum;
    let (out, waiting) = (out.as_slice(), check_tree(terms)?);
    if waiting > WAITING {
        let expected = format!("at most {WAITING}");
        return Err(KernelError::shape(KERNEL, "sums that wait", expected, waiting));
    }
    if terms.len() > TERMS {
        let expected = format!("at most {TERMS}");
        return Err(KernelError::shape(KERNEL, "terms", expected, terms.len()));
    }
    let mut addresses = [out.address(); TERMS];
    let mut joins = [0; TERMS];
    for ((address, join), term) in addresses.iter_mut().zip(&mut joins).zip(terms) {
        match &term.values {
            TermValues::Out => {}
            TermValues::Buffer(values) => {
                exactly(KERNEL, "term", values, out.elements)?;
                *address = values.address();
            }
            TermValues::Host(_) => {
                let expected = "in the memory of a device";
                return Err(KernelError::shape(KERNEL, "term", expected, "the host's"));
            }
        }
        // A tree has fewer joins than terms.
        *join = term.joins as u8;
    }
    let operands = addresses.map(|address| (address, 0));
    let access = Access::of(WIDE_BYTES, &operands);
    let ([wide, single], batch) = variant(&joins[..terms.len()]);
    let pack = if access == Access::Wide { 4 } else { 1 };
    let arguments = TreeSum {
        out: out.address(),
        terms: addresses,
        elements: out.elements as u64,
        term_count: terms.len() as u32,
        joins,
        padding: [0; 4],
    };
    let tiles = out.elements.div_ceil(THREADS as usize * batch * pack);
    Ok(Prepared { arguments, kernel: access.choose(wide, single), tiles })
}

impl<D: Driver, P: Precision> backend::TreeSums for Gpu<D, P> {
    fn tree_sums(&self, stream: &mut GpuStream<D>, sums: Vec<TreeSumOf<'_, Self>>) -> Result<()> {
        // All are checked before any is written.
        let sums = sums.into_iter().map(|sum| Ok((prepared(&sum)?, sum)));
        let mut together: Vec<Prepared> = Vec::new();
        for (prepared, TreeSumOf { out, terms }) in sums.collect::<Result<Vec<_>>>()? {
            if let [TreeTerm { values, .. }] = terms[..] {
                if let TermValues::Buffer(values) = values {
                    crate::Runtime::copy(self, stream, out, values)?;
                }
                continue;
            }
            let is_other = |last: &Prepared| last.kernel != prepared.kernel;
            if together.len() == SUMS || together.last().is_some_and(is_other) {
                self.launch_together(stream, &together)?;
                together.clear();
            }
            together.push(prepared);
        }
        self.launch_together(stream, &together)
    }
}

impl<D: Driver, P: Precision> Gpu<D, P> {
    fn launch_together(&self, stream: &mut GpuStream<D>, together: &[Prepared]) -> Result<()> {
        let tiles = together.iter().map(|sum| sum.tiles).sum::<usize>();
        let Some(Prepared { kernel, .. }) = together.first().filter(|_| tiles > 0) else {
            return Ok(());
        };
        let mut arguments = TreeSums::zeroed();
        for (place, sum) in arguments.sums.iter_mut().zip(together) {
            *place = sum.arguments;
        }
        arguments.count = together.len() as u32;
        let launch = blocks(KERNEL, tiles.min(BLOCKS), THREADS)?;
        // SAFETY: every term has the elements of its sum; a term that is where the sum goes is read by the thread that writes
        // there, before it does. Other sums neither read nor write what one writes, as each is borrowed mutably. Terms of peers
        // are in memory that this device reaches, as the caller promised.
        unsafe { self.launch(stream, &TREE_SUM, kernel, launch, arguments) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_trees_have_kernels_of_their_own() {
        for (joins, name) in [
            (&[0, 1][..], "tree_sum_of_2_wide"),
            (&[0, 1, 0, 2], "tree_sum_of_4_wide"),
            (&[0, 1, 0, 2, 0, 1, 0, 3], "tree_sum_of_8_wide"),
            (&[0, 1, 1], "tree_sum_of_any_wide"),
            (&[0, 0, 1, 1], "tree_sum_of_any_wide"),
        ] {
            assert_eq!(variant(joins).0[0], name, "{joins:?}");
        }
    }
}
