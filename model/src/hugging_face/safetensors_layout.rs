//! The place of every fp32 tensor in a `.safetensors` file, before a byte of it is written.
//!
//! A checkpoint arrives at its writer as chunks of arenas, from any worker that owns them and in any order. So the file is planned
//! first: [`SafetensorsLayout`] has the header and the offsets of a list of tensors, and an [`ArenaPlacement`] maps a range of an
//! arena to writes into the file, leaving out the padding that only memory has.
//!
//! The bytes are those that the `safetensors` library writes for the same tensors: fp32, in order of their names, the header padded
//! with spaces to a multiple of 8, and `{"format": "pt"}` as the only metadata (transformers insists on it; the order of a second
//! entry would be that of a hash map).

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use crate::layout::Layout;

const ELEMENT_BYTES: usize = size_of::<f32>();
/// The file begins with the length of the header, in this many bytes; the header is padded to a
/// multiple of as many.
const LENGTH_BYTES: usize = size_of::<u64>();

/// A tensor's place in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileTensor {
    /// The name in the file.
    pub name: String,
    /// The shape in the file.
    pub shape: Vec<usize>,
    /// The first byte, counted from the start of the file.
    pub file_offset: u64,
    /// The number of elements.
    pub elements: usize,
}

/// The plan of a `.safetensors` file of fp32 tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SafetensorsLayout {
    header: Vec<u8>,
    tensors: Vec<FileTensor>,
    file_bytes: u64,
}

impl SafetensorsLayout {
    /// The plan of a file that holds `tensors`, each a name and a shape. If several have the same
    /// name, the last is kept.
    pub fn new(tensors: impl IntoIterator<Item = (String, Vec<usize>)>) -> Self {
        let tensors: BTreeMap<String, Vec<usize>> = tensors.into_iter().collect();
        let (mut places, mut infos, mut end) = (Vec::new(), Vec::new(), 0);
        for (name, shape) in tensors {
            let elements = shape.iter().product::<usize>();
            let start = end;
            end += elements * ELEMENT_BYTES;
            let info =
                TensorInfo { dtype: Dtype::F32, shape: shape.clone(), data_offsets: (start, end) };
            infos.push((name.clone(), info));
            places.push(FileTensor { name, shape, file_offset: start as u64, elements });
        }
        let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        let metadata = Metadata::new(Some(format), infos).expect("offsets are made without holes");
        let mut json = serde_json::to_vec(&metadata).expect("a header is plain JSON");
        json.resize(json.len().next_multiple_of(LENGTH_BYTES), b' ');
        let mut header = (json.len() as u64).to_le_bytes().to_vec();
        header.append(&mut json);
        for place in &mut places {
            place.file_offset += header.len() as u64;
        }
        let file_bytes = (header.len() + end) as u64;
        Self { header, tensors: places, file_bytes }
    }

    /// The plan of a file that holds one arena of `layout` for every prefix, as `<prefix><name>`: `[""]` for the
    /// parameters, `["exp_avg.", "exp_avg_sq."]` for the state of AdamW.
    pub fn of_arenas(layout: &Layout, prefixes: &[&str]) -> Self {
        let arenas: Vec<_> = prefixes.iter().map(|&prefix| (layout, prefix)).collect();
        Self::of_segments(&arenas, 0..layout.segments().len())
    }

    /// As [`of_arenas`](Self::of_arenas), for arenas with a layout and a prefix each, and for some
    /// of their segments, given by index.
    pub(super) fn of_segments(arenas: &[(&Layout, &str)], segments: Range<usize>) -> Self {
        Self::new(arenas.iter().flat_map(|&(layout, prefix)| {
            let segments = layout.segments().get(segments.clone()).unwrap_or_default();
            let tensors =
                segments.iter().flat_map(|segment| &layout.tensors()[segment.tensors.clone()]);
            tensors.map(move |tensor| (format!("{prefix}{}", tensor.name), tensor.shape.clone()))
        }))
    }

    /// The first bytes of the file, up to the first tensor.
    pub fn header_bytes(&self) -> &[u8] {
        &self.header
    }

    /// The size of the file.
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// The tensors, in the order of the file.
    pub fn tensors(&self) -> &[FileTensor] {
        &self.tensors
    }

    /// The places in this file of the elements of an arena of `layout`, whose tensors' names in the file begin with `prefix`.
    /// Tensors that the file does not hold have no place.
    pub fn placement(&self, layout: &Layout, prefix: &str) -> ArenaPlacement {
        let mut places = Vec::with_capacity(layout.tensors().len());
        for tensor in layout.tensors() {
            let name = format!("{prefix}{}", tensor.name);
            let found = self.tensors.binary_search_by(|place| place.name.as_str().cmp(&name));
            if let Ok(index) = found {
                let file_offset = self.tensors[index].file_offset;
                places.push(FilePiece { arena: tensor.range(), file_offset });
            }
        }
        places.sort_by_key(|piece| piece.arena.start);
        ArenaPlacement { places }
    }
}

/// A range of an arena that is contiguous in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilePiece {
    /// Elements of the arena.
    pub arena: Range<usize>,
    /// The first byte in the file; the piece is `4 * arena.len()` bytes long.
    pub file_offset: u64,
}

/// The places of the elements of one arena in one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaPlacement {
    /// Whole tensors, in arena order.
    places: Vec<FilePiece>,
}

impl ArenaPlacement {
    /// The pieces of the file that hold the elements `range` of the arena, in arena order; padding has none.
    pub fn pieces(&self, range: Range<usize>) -> impl Iterator<Item = FilePiece> + '_ {
        let first = self.places.partition_point(|place| place.arena.end <= range.start);
        self.places[first..]
            .iter()
            .take_while({
                let end = range.end;
                move |place| place.arena.start < end
            })
            .map(move |place| {
                let start = place.arena.start.max(range.start);
                let skipped_bytes = (start - place.arena.start) * ELEMENT_BYTES;
                FilePiece {
                    arena: start..place.arena.end.min(range.end),
                    file_offset: place.file_offset + skipped_bytes as u64,
                }
            })
            .filter(|piece| !piece.arena.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Decay;
    use safetensors::SafeTensors;
    use safetensors::tensor::TensorView;

    /// Two tensors whose order in the arena is not that of their names, the first with padding rows.
    fn layout() -> Layout {
        let mut layout = Layout::new();
        layout.segment("embedding");
        layout.tensor("table", &[5, 3], Decay::Decayed, 8);
        layout.segment("layers.0");
        layout.tensor("a \"quoted\" name", &[2, 1, 3], Decay::Exempt, 1);
        layout.tensor("scalar", &[], Decay::Exempt, 1);
        layout
    }

    /// A file written piece by piece from chunks of the arena that cut tensors anywhere.
    fn written_in_chunks(layout: &Layout, arena: &[f32], chunk: usize) -> Vec<u8> {
        let plan = SafetensorsLayout::of_arenas(layout, &[""]);
        let placement = plan.placement(layout, "");
        let mut file = vec![0xee; plan.file_bytes() as usize];
        file[..plan.header_bytes().len()].copy_from_slice(plan.header_bytes());
        for start in (0..arena.len()).step_by(chunk).collect::<Vec<_>>().into_iter().rev() {
            for piece in placement.pieces(start..(start + chunk).min(arena.len())) {
                let bytes: &[u8] = bytemuck::cast_slice(&arena[piece.arena]);
                let offset = piece.file_offset as usize;
                file[offset..offset + bytes.len()].copy_from_slice(bytes);
            }
        }
        file
    }

    #[test]
    fn chunks_of_any_size_make_the_bytes_of_the_safetensors_library() {
        let layout = layout();
        let arena: Vec<f32> = (0..layout.parameter_elements()).map(|i| i as f32 + 0.5).collect();
        let views = layout.tensors().iter().map(|tensor| {
            let bytes = bytemuck::cast_slice(&arena[tensor.range()]);
            let view = TensorView::new(Dtype::F32, tensor.shape.clone(), bytes).expect("fits");
            (tensor.name.clone(), view)
        });
        let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        let expected = safetensors::serialize(views, Some(format)).expect("serializes");
        for chunk in [1, 4, 7, 16, 1000] {
            assert_eq!(written_in_chunks(&layout, &arena, chunk), expected, "chunks of {chunk}");
        }
    }

    #[test]
    fn every_prefix_has_a_place_of_its_own() {
        let layout = layout();
        let plan = SafetensorsLayout::of_arenas(&layout, &["exp_avg.", "exp_avg_sq."]);
        assert_eq!(plan.tensors().len(), 6);
        let logical: usize = layout.parameters();
        let mut bytes = vec![0; plan.file_bytes() as usize];
        bytes[..plan.header_bytes().len()].copy_from_slice(plan.header_bytes());
        let mut covered = vec![0_u8; bytes.len()];
        for prefix in ["exp_avg.", "exp_avg_sq."] {
            let placement = plan.placement(&layout, prefix);
            for piece in placement.pieces(0..layout.parameter_elements()) {
                let start = piece.file_offset as usize;
                covered[start..start + piece.arena.len() * 4].iter_mut().for_each(|n| *n += 1);
            }
        }
        assert!(covered[plan.header_bytes().len()..].iter().all(|n| *n == 1));
        assert_eq!(covered.iter().filter(|n| **n == 1).count(), 2 * logical * 4);
        let file = SafeTensors::deserialize(&bytes).expect("a valid file");
        assert_eq!(file.tensor("exp_avg_sq.table").expect("there").shape(), [5, 3]);
        assert_eq!(plan.placement(&layout, "none.").pieces(0..99).count(), 0);
    }

    #[test]
    fn padding_has_no_place() {
        let layout = layout();
        let placement = SafetensorsLayout::of_arenas(&layout, &[""]).placement(&layout, "");
        // The table has 15 elements and 9 of padding rows, then 8 of alignment.
        assert_eq!(placement.pieces(15..32).count(), 0);
        let arenas = |range| placement.pieces(range).map(|piece| piece.arena).collect::<Vec<_>>();
        assert_eq!(arenas(14..33), [14..15, 32..33]);
        assert_eq!(arenas(3..34), [3..15, 32..34]);
        assert_eq!(placement.pieces(5..5).count(), 0);
    }
}
