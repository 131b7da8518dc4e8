//! Reads tensors from `.safetensors` files, one or several, as fp32 and a piece at a time.
//!
//! Opening reads the headers only and checks them against the sizes of the files, so that a
//! truncated or damaged file is refused before memory is allocated for it. Files are read with
//! plain reads, not memory maps, because another program may change them meanwhile: a file that is
//! cut short then gives an error instead of a signal.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::Metadata;
use serde_json::Value;
use tidemill_files::Kind;

use super::decode::{decode, element_bytes};
use crate::error::{ModelError, Result};
use crate::layout::Layout;

/// The file of a model in one file.
pub const SINGLE_FILE: &str = "model.safetensors";
/// The index of a model in several files: `weight_map` names the file of every tensor.
pub const INDEX_FILE: &str = "model.safetensors.index.json";
/// The longest header that the `safetensors` library accepts.
const MOST_HEADER_BYTES: u64 = 100_000_000;
/// The bytes that are read at a time.
const PIECE_BYTES: usize = 1 << 20;

struct OpenFile {
    path: PathBuf,
    file: File,
}

struct StoredTensor {
    file: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    file_offset: u64,
}

/// Elements of a tensor, as a file holds them.
pub struct StoredElements<'a> {
    /// The tensor.
    pub name: &'a str,
    /// Which of its elements.
    pub range: Range<usize>,
    dtype: Dtype,
    bytes: &'a [u8],
}

impl StoredElements<'_> {
    /// Decodes elements of the tensor, from `first` on, as many as `out` is long.
    ///
    /// # Panics If not all of them are present.
    pub fn decode(&self, first: usize, out: &mut [f32]) {
        let bytes = element_bytes(self.dtype).expect("checked when the file was opened");
        let start = (first - self.range.start) * bytes;
        decode(self.dtype, &self.bytes[start..start + out.len() * bytes], out);
    }
}

/// The tensors of one or more open `.safetensors` files. They may be read by several threads at once.
pub struct TensorFiles {
    /// The file or index that an error about a missing tensor names.
    path: PathBuf,
    files: Vec<OpenFile>,
    tensors: BTreeMap<String, StoredTensor>,
}

/// Whether a tensor is one of the masks that old files of GPT-Neo hold beside its parameters, in types of their own.
fn is_mask(name: &str) -> bool {
    const MASKS: [&str; 2] = [".attn.attention.bias", ".attn.attention.masked_bias"];
    MASKS.iter().any(|mask| name.ends_with(mask))
}

impl TensorFiles {
    /// The weights of a Hugging Face folder: `model.safetensors`, or the files that
    /// `model.safetensors.index.json` names.
    ///
    /// # Errors
    /// Files that are missing, unreadable or damaged.
    pub fn open_folder(folder: &Path) -> Result<Self> {
        let (single, index) = (folder.join(SINGLE_FILE), folder.join(INDEX_FILE));
        if single.exists() {
            Self::open(&single)
        } else if index.exists() {
            Self::open_index(&index)
        } else {
            let what = if folder.join("pytorch_model.bin").exists() {
                format!("has pytorch_model.bin; convert it to {SINGLE_FILE} first")
            } else {
                format!("expected a folder with {SINGLE_FILE} or {INDEX_FILE}")
            };
            Err(ModelError::format(folder, what))
        }
    }

    /// The tensors of one file.
    ///
    /// # Errors
    /// A file that is missing, unreadable or damaged.
    pub fn open(path: &Path) -> Result<Self> {
        let mut files = Self { path: path.to_owned(), files: Vec::new(), tensors: BTreeMap::new() };
        files.add(path)?;
        Ok(files)
    }

    /// The tensors of the files that the index `path` names.
    ///
    /// # Errors
    /// An index or a file that is missing, unreadable or damaged.
    pub fn open_index(path: &Path) -> Result<Self> {
        let bytes = tidemill_files::read(path, Kind::TensorIndex)
            .map_err(|source| reading(path, source))?;
        let index: Value = serde_json::from_slice(&bytes)
            .map_err(|error| ModelError::format(path, format!("is not JSON: {error}")))?;
        let map = index.get("weight_map").and_then(Value::as_object);
        let wrong = |what: &str| ModelError::format(path, format!("weight_map: expected {what}"));
        let map = map.ok_or_else(|| wrong("an object of tensor names and file names"))?;
        let mut files = Self { path: path.to_owned(), files: Vec::new(), tensors: BTreeMap::new() };
        let mut opened: BTreeMap<&str, usize> = BTreeMap::new();
        for (name, file) in map {
            // A name with a separator could point out of the folder.
            let file = file
                .as_str()
                .filter(|file| !file.contains(['/', '\\']) && *file != "..")
                .ok_or_else(|| wrong(&format!("the name of a file beside it for {name}")))?;
            let number = match opened.get(file) {
                Some(number) => *number,
                None => {
                    let number = files.add(&path.with_file_name(file))?;
                    opened.insert(file, number);
                    number
                }
            };
            if is_mask(name) {
                continue;
            }
            if files.tensors.get(name).is_none_or(|stored| stored.file != number) {
                return Err(ModelError::format(
                    &files.files[number].path,
                    format!("tensor {name} is missing, which {INDEX_FILE} places here"),
                ));
            }
        }
        Ok(files)
    }

    /// Opens one more file; returns its number.
    fn add(&mut self, path: &Path) -> Result<usize> {
        let damaged = |what: String| ModelError::format(path, what);
        let mut file = tidemill_files::open(path).map_err(|source| reading(path, source))?;
        let file_bytes = file.metadata().map_err(|source| reading(path, source))?.len();
        let mut length = [0; 8];
        if file_bytes < 8 {
            return Err(damaged(format!("is cut short: {file_bytes} bytes hold no header")));
        }
        file.read_exact(&mut length).map_err(|source| reading(path, source))?;
        let header_bytes = u64::from_le_bytes(length);
        if header_bytes > (file_bytes - 8).min(MOST_HEADER_BYTES) {
            return Err(damaged(format!(
                "is no safetensors file or is cut short: a header of {header_bytes} bytes in a file of \
                 {file_bytes}"
            )));
        }
        let mut header = vec![0; header_bytes as usize];
        file.read_exact(&mut header).map_err(|source| reading(path, source))?;
        let header: Metadata = serde_json::from_slice(&header)
            .map_err(|error| damaged(format!("has a damaged header: {error}")))?;
        let data_start = 8 + header_bytes;
        let expected_bytes = data_start.checked_add(header.data_len() as u64);
        if expected_bytes != Some(file_bytes) {
            let expected =
                expected_bytes.map_or("2^64 or more".to_owned(), |bytes| bytes.to_string());
            return Err(damaged(format!(
                "is cut short or damaged: expected {expected} bytes, found {file_bytes}"
            )));
        }
        let number = self.files.len();
        for (name, info) in header.tensors() {
            if is_mask(&name) {
                continue;
            }
            if element_bytes(info.dtype).is_none() {
                return Err(damaged(format!(
                    "tensor {name}: expected F32, F16 or BF16, found {}",
                    info.dtype
                )));
            }
            let stored = StoredTensor {
                file: number,
                dtype: info.dtype,
                shape: info.shape.clone(),
                file_offset: data_start + info.data_offsets.0 as u64,
            };
            if let Some(other) = self.tensors.insert(name.clone(), stored) {
                let first = self.files[other.file].path.display();
                return Err(damaged(format!("tensor {name} stands in {first} too")));
            }
        }
        self.files.push(OpenFile { path: path.to_owned(), file });
        Ok(number)
    }

    /// The files, by their numbers.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|file| file.path.as_path())
    }

    /// The number of the file that a tensor is in.
    pub fn file_of(&self, name: &str) -> Option<usize> {
        self.tensors.get(name).map(|stored| stored.file)
    }

    /// Reads file `number` from its first byte to its last. `visit` receives all of its bytes, a
    /// piece at a time, and with each piece the elements of a tensor that it holds, if any.
    ///
    /// # Errors
    /// A file that cannot be read, or an error of `visit`.
    pub fn read_through<E: From<ModelError>>(
        &self,
        number: usize,
        mut visit: impl FnMut(&[u8], Option<StoredElements<'_>>) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let OpenFile { path, file } = &self.files[number];
        let end = file.metadata().map_err(|source| reading(path, source))?.len();
        let of_file = |(_, stored): &(&String, &StoredTensor)| stored.file == number;
        let mut tensors: Vec<_> = self.tensors.iter().filter(of_file).collect();
        tensors.sort_by_key(|(_, stored)| stored.file_offset);
        let places =
            tensors.into_iter().map(|(name, stored)| (stored.file_offset, Some((name, stored))));
        let mut buffer = vec![0; PIECE_BYTES];
        let mut at = 0;
        for (start, tensor) in places.chain([(end, None)]) {
            while at < start {
                let bytes = &mut buffer[..PIECE_BYTES.min((start - at) as usize)];
                file.read_exact_at(bytes, at).map_err(|source| reading(path, source))?;
                visit(bytes, None)?;
                at += bytes.len() as u64;
            }
            let Some((name, &StoredTensor { dtype, ref shape, .. })) = tensor else { break };
            let element_bytes = element_bytes(dtype).expect("checked when the file was opened");
            let elements: usize = shape.iter().product();
            for first in (0..elements).step_by(PIECE_BYTES / element_bytes) {
                let range = first..elements.min(first + PIECE_BYTES / element_bytes);
                let bytes = &mut buffer[..range.len() * element_bytes];
                file.read_exact_at(bytes, at).map_err(|source| reading(path, source))?;
                visit(bytes, Some(StoredElements { name, range, dtype, bytes }))?;
                at += bytes.len() as u64;
            }
        }
        Ok(())
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The shape of a tensor; `None` where no tensor has this name.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|stored| stored.shape.as_slice())
    }

    /// Lets the tensor `stored` be read under the name `name` as well, unless `name` already
    /// exists.
    pub(super) fn rename(&mut self, stored: &str, name: &str) {
        if !self.tensors.contains_key(name)
            && let Some(tensor) = self.tensors.remove(stored)
        {
            self.tensors.insert(name.to_owned(), tensor);
        }
    }

    /// Checks that every tensor of `layout` is present under `<prefix><name>` and with its shape.
    ///
    /// # Errors
    /// A tensor that is missing, or one of another shape.
    pub fn check(&self, layout: &Layout, prefix: &str) -> Result<()> {
        for tensor in layout.tensors() {
            let name = format!("{prefix}{}", tensor.name);
            let stored = self.stored(&name)?;
            if stored.shape != tensor.shape {
                let path = &self.files[stored.file].path;
                let (expected, found) = (&tensor.shape, &stored.shape);
                let what = format!("tensor {name}: expected shape {expected:?}, found {found:?}");
                return Err(ModelError::format(path, what));
            }
        }
        Ok(())
    }

    fn stored(&self, name: &str) -> Result<&StoredTensor> {
        self.tensors
            .get(name)
            .ok_or_else(|| ModelError::format(&self.path, format!("tensor {name} is missing")))
    }

    /// Reads elements `first ..` of a tensor, as many as `out` is long.
    ///
    /// # Errors
    /// A tensor that is missing or shorter, or a file that cannot be read.
    pub fn read(&self, name: &str, first: usize, out: &mut [f32]) -> Result<()> {
        let stored = self.stored(name)?;
        let OpenFile { path, file } = &self.files[stored.file];
        let elements: usize = stored.shape.iter().product();
        if first.checked_add(out.len()).is_none_or(|end| end > elements) {
            let wanted = format!("{first}..{}", first.saturating_add(out.len()));
            let what = format!("tensor {name}: expected elements {wanted}, found {elements}");
            return Err(ModelError::format(path, what));
        }
        let element_bytes = element_bytes(stored.dtype).expect("checked when the file was opened");
        let mut offset = stored.file_offset + (first * element_bytes) as u64;
        let mut bytes = vec![0; PIECE_BYTES.min(out.len() * element_bytes)];
        for piece in out.chunks_mut(PIECE_BYTES / element_bytes) {
            let bytes = &mut bytes[..piece.len() * element_bytes];
            file.read_exact_at(bytes, offset).map_err(|source| reading(path, source))?;
            decode(stored.dtype, bytes, piece);
            offset += bytes.len() as u64;
        }
        Ok(())
    }

    /// Reads elements `start ..` of an arena of `layout` whose tensors are named `<prefix><name>`, as many as `out` is
    /// long; padding becomes zero. [`check`](Self::check) first.
    ///
    /// # Errors
    /// A tensor that is missing, or a file that cannot be read.
    pub fn read_arena(
        &self,
        layout: &Layout,
        prefix: &str,
        start: usize,
        out: &mut [f32],
    ) -> Result<()> {
        out.fill(0.0);
        let end = start + out.len();
        for tensor in layout.tensors() {
            let range = tensor.range();
            let (first, last) = (range.start.max(start), range.end.min(end));
            if first < last {
                let name = format!("{prefix}{}", tensor.name);
                self.read(&name, first - range.start, &mut out[first - start..last - start])?;
            }
        }
        Ok(())
    }
}

fn reading(path: &Path, source: std::io::Error) -> ModelError {
    ModelError::File { action: "reading", path: path.to_owned(), source }
}
