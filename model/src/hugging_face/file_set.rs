//! Which file each tensor is in: one file, or several where one would be too large.
//!
//! Files are cut as `transformers` cuts them, into `model-00001-of-00003.safetensors` and so on,
//! with an index beside them that names the file of every tensor. The cut depends on nothing but
//! the layout: each file takes whole segments, in order, as many as fit. So every tensor is in
//! exactly one file, the file of its segment.

use std::ops::Range;

use serde_json::{Map, Value, json};

use super::safetensors_layout::{ArenaPlacement, SafetensorsLayout};
use crate::layout::Layout;

/// The most bytes of tensors in a file with several segments: 5 GB, which object stores and tools
/// accept everywhere.
pub const FILE_BYTES: u64 = 5_000_000_000;

/// A file of a set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedFile {
    /// Its name.
    pub name: String,
    /// The tensors that it holds, and their places.
    pub layout: SafetensorsLayout,
}

/// The files of one or more arenas of a layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSet {
    files: Vec<PlannedFile>,
    index: Option<(String, Vec<u8>)>,
    /// The elements of the parameters' arena that each file holds, in order.
    ranges: Vec<Range<usize>>,
}

impl FileSet {
    /// The files of one arena of `layout` for every prefix, as [`SafetensorsLayout::of_arenas`]
    /// plans them: one file, `<stem>.safetensors`, where an arena has at most `file_bytes` bytes;
    /// else several with at most as many bytes each, except where one segment alone has more.
    pub fn new(layout: &Layout, stem: &str, prefixes: &[&str], file_bytes: u64) -> Self {
        let arenas: Vec<_> = prefixes.iter().map(|&prefix| (layout, prefix)).collect();
        Self::of_arenas(layout, stem, &arenas, file_bytes)
    }

    /// The same where each arena has a layout of its own, with as many segments as `layout`, whose
    /// sizes alone decide the cut. It is one file where an arena of `layout` has at most
    /// `file_bytes` bytes.
    pub fn of_arenas(
        layout: &Layout,
        stem: &str,
        arenas: &[(&Layout, &str)],
        file_bytes: u64,
    ) -> Self {
        let bytes_of = |layout: &Layout, segments: Range<usize>| -> u64 {
            let segments = layout.segments().get(segments).unwrap_or_default();
            let tensors = segments.iter().flat_map(|it| &layout.tensors()[it.tensors.clone()]);
            tensors.map(|tensor| 4 * tensor.elements() as u64).sum()
        };
        let all = 0..layout.segments().len();
        let arena = 0..layout.parameter_elements();
        if bytes_of(layout, all.clone()) <= file_bytes {
            let name = format!("{stem}.safetensors");
            let layout = SafetensorsLayout::of_segments(arenas, all);
            let files = vec![PlannedFile { name, layout }];
            return Self { files, index: None, ranges: std::iter::once(arena).collect() };
        }
        // For each file its segments, its elements of the arena of `layout`, and its bytes.
        let mut cuts: Vec<(Range<usize>, Range<usize>, u64)> = Vec::new();
        for (index, segment) in layout.segments().iter().enumerate() {
            let (segments, range) = (index..index + 1, segment.range.clone());
            let bytes = arenas.iter().map(|(layout, _)| bytes_of(layout, segments.clone())).sum();
            match cuts.last_mut() {
                Some((last, elements, sum)) if *sum + bytes <= file_bytes => {
                    (last.end, elements.end) = (segments.end, range.end);
                    *sum += bytes;
                }
                _ => cuts.push((segments, range, bytes)),
            }
        }
        let (mut files, mut map) = (Vec::new(), Map::new());
        let total: u64 = cuts.iter().map(|(_, _, bytes)| bytes).sum();
        for (number, (segments, _, _)) in cuts.iter().enumerate() {
            let name = format!("{stem}-{:05}-of-{:05}.safetensors", number + 1, cuts.len());
            let layout = SafetensorsLayout::of_segments(arenas, segments.clone());
            let names = layout.tensors().iter().map(|tensor| tensor.name.clone());
            map.extend(names.map(|tensor| (tensor, Value::from(name.as_str()))));
            files.push(PlannedFile { name, layout });
        }
        let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
        let index = (format!("{stem}.safetensors.index.json"), super::config_bytes(&index));
        let ranges = cuts.into_iter().map(|(_, range, _)| range).collect();
        Self { files, index: Some(index), ranges }
    }

    /// The files, in the order of the arena.
    pub fn files(&self) -> &[PlannedFile] {
        &self.files
    }

    /// The name and the bytes of the index, where there are several files.
    pub fn index(&self) -> Option<(&str, &[u8])> {
        self.index.as_ref().map(|(name, bytes)| (name.as_str(), bytes.as_slice()))
    }

    /// The number of the file that holds `element` of the parameters' arena, and that element's
    /// part of the other arenas.
    pub fn file_of(&self, element: usize) -> usize {
        self.ranges.partition_point(|range| range.end <= element).min(self.files.len() - 1)
    }

    /// For each file, the places in it of the elements of the arena of `layout`, whose tensors'
    /// names there begin with `prefix`.
    pub fn placements(&self, layout: &Layout, prefix: &str) -> Vec<ArenaPlacement> {
        self.files.iter().map(|file| file.layout.placement(layout, prefix)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Decay;

    /// A table of 60 bytes, and layers of 24 bytes whose names sort in another order than that of
    /// the arena.
    fn layout() -> Layout {
        let mut layout = Layout::new();
        layout.segment("embedding");
        layout.tensor("table", &[5, 3], Decay::Decayed, 8);
        for layer in 0..4 {
            layout.segment(format!("layers.{layer}"));
            layout.tensor(format!("layers.{layer}.z"), &[4], Decay::Exempt, 1);
            layout.tensor(format!("layers.{layer}.a"), &[2], Decay::Exempt, 1);
        }
        layout
    }

    #[test]
    fn what_has_room_is_one_file_as_before() {
        let layout = layout();
        for (prefixes, stem) in [(&[""][..], "model"), (&["exp_avg.", "exp_avg_sq."], "optimizer")]
        {
            let set = FileSet::new(&layout, stem, prefixes, 156);
            assert_eq!(set.index(), None);
            let name = format!("{stem}.safetensors");
            let expected = SafetensorsLayout::of_arenas(&layout, prefixes);
            assert_eq!(set.files(), [PlannedFile { name, layout: expected }]);
        }
    }

    #[test]
    fn files_are_cut_between_segments_where_they_are_full() {
        let layout = layout();
        let cut = |prefixes: &[&str], file_bytes| {
            let set = FileSet::new(&layout, "model", prefixes, file_bytes);
            let names = |file: &PlannedFile| -> Vec<String> {
                file.layout.tensors().iter().map(|tensor| tensor.name.clone()).collect()
            };
            set.files().iter().map(names).collect::<Vec<_>>()
        };
        let layers = |layers: Range<usize>| -> Vec<String> {
            layers
                .flat_map(|layer| ["a", "z"].map(|name| format!("layers.{layer}.{name}")))
                .collect()
        };
        let table = vec!["table".to_owned()];
        let first = [layers(0..3), table.clone()].concat();
        assert_eq!(cut(&[""], 155), [first, layers(3..4)], "names are in order");
        assert_eq!(cut(&[""], 60), [table.clone(), layers(0..2), layers(2..4)]);
        let each = [table, layers(0..1), layers(1..2), layers(2..3), layers(3..4)];
        assert_eq!(cut(&[""], 30), each);
        assert_eq!(cut(&[""], 1), each, "a segment is never cut");
        assert_eq!(cut(&["m.", "v."], 96).len(), 3, "the table, then layers of 48 bytes by twos");
    }

    #[test]
    fn the_index_has_the_file_of_every_tensor() {
        let layout = layout();
        let set = FileSet::new(&layout, "model", &[""], 60);
        let (name, bytes) = set.index().unwrap();
        assert_eq!(name, "model.safetensors.index.json");
        let index: Value = serde_json::from_slice(bytes).unwrap();
        assert_eq!(index["metadata"]["total_size"], 156);
        assert_eq!(index["weight_map"].as_object().unwrap().len(), 9);
        for (number, file) in set.files().iter().enumerate() {
            assert_eq!(file.name, format!("model-0000{}-of-00003.safetensors", number + 1));
            for tensor in file.layout.tensors() {
                assert_eq!(index["weight_map"][&tensor.name], file.name);
                let of_layout = layout.tensors().iter().find(|it| it.name == tensor.name).unwrap();
                assert_eq!(set.file_of(of_layout.offset), number);
            }
        }
        assert_eq!(set.file_of(layout.parameter_elements() - 1), 2);
    }
}
