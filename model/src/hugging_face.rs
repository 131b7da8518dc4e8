//! Models in the layout of Hugging Face: folders that `transformers` opens as they are.
//!
//! - [`ModelConfig::read`] reads `config.json` tolerantly; it is written explicitly;
//! - [`TensorFiles`] reads `.safetensors`, in one file or several, into arenas;
//! - [`FileSet`] says which files a model is, and [`SafetensorsLayout`] plans each, so that it can be written chunk by chunk.
//!
//! Start at [`load`] and [`save`], which treat a whole model at once; checkpoints of a run stream
//! their tensors through the parts above. Files are written in fp32 and hold logical tensors only:
//! no padding, no copy of a tied tensor.

mod config;
mod decode;
mod file_set;
pub(crate) mod keys;
mod safetensors_layout;
mod tensor_files;

use std::borrow::Cow;
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;
use tidemill_files::Kind;
use tidemill_kernels::Backend;

pub use config::MambaHuggingFaceConfig;
pub use file_set::{FILE_BYTES, FileSet, PlannedFile};
pub use safetensors_layout::{ArenaPlacement, FilePiece, FileTensor, SafetensorsLayout};
pub use tensor_files::{INDEX_FILE, SINGLE_FILE, StoredElements, TensorFiles};

use crate::error::{ModelError, Result};
use crate::language_model::LanguageModel;
use crate::layout::Layout;
use crate::model_config::ModelConfig;

/// The file with the config of a model.
pub const CONFIG_FILE: &str = "config.json";

/// The embedding table of Mamba, whose original name lacks an `s`.
const EMBEDDING: &str = "backbone.embeddings.weight";
const ORIGINAL_EMBEDDING: &str = "backbone.embedding.weight";
/// A copy of the embedding in files of tied models, which transformers leaves out and other
/// programs write.
const HEAD: &str = "lm_head.weight";
/// The number of elements of two tensors that are compared at a time.
const COMPARED_ELEMENTS: usize = 1 << 18;
/// The number of elements that are written at a time.
const WRITTEN_ELEMENTS: usize = 1 << 18;

/// The model in `folder` and its parameter arena.
///
/// # Errors
/// As [`ModelConfig::read`] and [`read_weights`].
pub fn load<B: Backend>(folder: &Path) -> Result<(LanguageModel<B>, Vec<f32>)> {
    let model = LanguageModel::new(&ModelConfig::read(folder)?)?;
    let arena = read_weights(folder, model.layout())?;
    Ok((model, arena))
}

/// The JSON in the file `path`.
pub(crate) fn read_json(path: &Path) -> Result<Value> {
    let bytes = tidemill_files::read(path, Kind::Config).map_err(|source| ModelError::File {
        action: "reading",
        path: PathBuf::from(path),
        source,
    })?;
    parse_json(path, &bytes)
}

/// The JSON in the bytes of `path`.
pub(crate) fn parse_json(path: &Path, bytes: &[u8]) -> Result<Value> {
    serde_json::from_slice(&with_infinity_as_text(bytes))
        .map_err(|error| ModelError::format(path, format!("is not JSON: {error}")))
}

/// Python writes infinity as the bare word `Infinity`, which is not JSON: it becomes the text
/// `"Infinity"`.
fn with_infinity_as_text(bytes: &[u8]) -> Cow<'_, [u8]> {
    const WORD: &[u8] = b"Infinity";
    if !bytes.windows(WORD.len()).any(|word| word == WORD) {
        return Cow::Borrowed(bytes);
    }
    let mut json = Vec::with_capacity(bytes.len() + 2);
    let (mut rest, mut in_text, mut escaped) = (bytes, false, false);
    while let [first, after @ ..] = rest {
        if let (false, Some(after)) = (in_text, rest.strip_prefix(WORD)) {
            json.extend_from_slice(b"\"Infinity\"");
            rest = after;
            continue;
        }
        in_text ^= *first == b'"' && !escaped;
        escaped = in_text && *first == b'\\' && !escaped;
        json.push(*first);
        rest = after;
    }
    Cow::Owned(json)
}

/// The bytes of a `config.json`.
pub fn config_bytes(config: &Value) -> Vec<u8> {
    let mut bytes = serde_json::to_vec_pretty(config).expect("a JSON value has no other form");
    bytes.push(b'\n');
    bytes
}

/// Reads the weights in `folder` into an arena of `layout`; padding is zero.
///
/// # Errors
/// Files that are missing or damaged, a tensor that is missing, unknown or of another shape, or a
/// tied head that differs from the embedding.
pub fn read_weights(folder: &Path, layout: &Layout) -> Result<Vec<f32>> {
    let mut files = TensorFiles::open_folder(folder)?;
    files.rename(ORIGINAL_EMBEDDING, EMBEDDING);
    // All shapes are checked before memory is allocated for the sizes that a config claims.
    files.check(layout, "")?;
    let known = |name: &str| layout.tensors().iter().any(|tensor| tensor.name == name);
    let unknown: Vec<_> = files.names().filter(|name| !known(name)).map(str::to_owned).collect();
    // The first tensor of every layout is the embedding table.
    let embedding = layout.tensors().first().map_or(EMBEDDING, |tensor| &tensor.name);
    for name in unknown {
        let tied = name == HEAD && files.shape(HEAD) == files.shape(embedding);
        if !tied || !equal(&files, HEAD, embedding)? {
            let what = if name == HEAD && files.shape(embedding).is_some() {
                format!("tensor {HEAD} differs from {embedding}, which the config ties it to")
            } else {
                format!("tensor {name} is none that this model has")
            };
            return Err(ModelError::format(folder, what));
        }
    }
    let mut arena = vec![0.0; layout.parameter_elements()];
    files.read_arena(layout, "", 0, &mut arena)?;
    Ok(arena)
}

/// Whether two tensors of one shape hold the same bits.
fn equal(files: &TensorFiles, a: &str, b: &str) -> Result<bool> {
    let elements: usize = files.shape(a).map_or(0, |shape| shape.iter().product());
    let (mut left, mut right) = (vec![0.0; COMPARED_ELEMENTS], vec![0.0; COMPARED_ELEMENTS]);
    for first in (0..elements).step_by(COMPARED_ELEMENTS) {
        let count = COMPARED_ELEMENTS.min(elements - first);
        files.read(a, first, &mut left[..count])?;
        files.read(b, first, &mut right[..count])?;
        let differs = |(x, y): (&f32, &f32)| x.to_bits() != y.to_bits();
        if left[..count].iter().zip(&right[..count]).any(differs) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Writes `config.json` and `model.safetensors`, or the files that a larger model is cut into, into the existing folder
/// `folder`.
///
/// Not atomic: a reader may see half of it. A run writes its checkpoints to a temporary folder and
/// renames them.
///
/// # Errors
/// An arena of another length, or a file that cannot be written.
pub fn save(folder: &Path, config: &Value, layout: &Layout, arena: &[f32]) -> Result<()> {
    save_in_files(folder, config, layout, arena, FILE_BYTES)
}

/// As [`save`], with another limit than [`FILE_BYTES`] on the size of files.
///
/// # Errors
/// As [`save`].
pub fn save_in_files(
    folder: &Path,
    config: &Value,
    layout: &Layout,
    arena: &[f32],
    file_bytes: u64,
) -> Result<()> {
    let expected = layout.parameter_elements();
    if arena.len() != expected {
        return Err(ModelError::ArenaSize { expected, found: arena.len() });
    }
    let set = FileSet::new(layout, "model", &[""], file_bytes);
    let index = set.index();
    // A reader would prefer this index of an earlier, larger model to the new file.
    let other = folder.join(if index.is_some() { SINGLE_FILE } else { INDEX_FILE });
    match std::fs::remove_file(&other) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(writing(&other, error)),
        _ => {}
    }
    let config = config_bytes(config);
    for (name, bytes) in index.into_iter().chain([(CONFIG_FILE, config.as_slice())]) {
        let path = folder.join(name);
        std::fs::write(&path, bytes).map_err(|source| writing(&path, source))?;
    }
    for PlannedFile { name, layout: plan } in set.files() {
        let path = folder.join(name);
        let mut file = File::create(&path).map_err(|source| writing(&path, source))?;
        file.write_all(plan.header_bytes()).map_err(|source| writing(&path, source))?;
        // Tensors in file order, not arena order, so that one pass without seeks writes the file.
        for tensor in plan.tensors() {
            let tensor = layout.tensors().iter().find(|it| it.name == tensor.name);
            let values = tensor.map_or(&[][..], |tensor| &arena[tensor.range()]);
            for piece in values.chunks(WRITTEN_ELEMENTS) {
                let bytes = stored_bytes(piece);
                file.write_all(&bytes).map_err(|source| writing(&path, source))?;
            }
        }
    }
    Ok(())
}

/// The bytes of fp32 values as files have them.
pub fn stored_bytes(values: &[f32]) -> Cow<'_, [u8]> {
    if cfg!(target_endian = "little") {
        return Cow::Borrowed(bytemuck::cast_slice(values));
    }
    values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>().into()
}

fn writing(path: &Path, source: std::io::Error) -> ModelError {
    ModelError::File { action: "writing", path: PathBuf::from(path), source }
}
