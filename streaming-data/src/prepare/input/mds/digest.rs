//! Hashes of files, as Python's `hashlib` and `xxhash` name and write them.
//!
//! Checked are MD5, SHA-1, SHA-2 (224 to 512), BLAKE2 and xxHash (32, 64, 3 with 64 and 128 bits).
//! Of several, the one that is computed fastest is enough: a damaged file has none of its hashes.
//! Others (SHA-3) are passed over, and the size of a file and the layout of its samples is all that
//! is checked.

use std::{collections::BTreeMap, fmt::Write as _, fs::File, io::Read, path::Path};

use blake2::{Blake2b512, Blake2s256};
use md5::Md5;
use sha1::Sha1;
use sha2::{Digest, Sha224, Sha256, Sha384, Sha512};
use xxhash_rust::{xxh3::Xxh3, xxh32::Xxh32, xxh64::Xxh64};

use crate::prepare::PrepareError;

/// How much of a file is read at once.
const BLOCK_BYTES: usize = 256 << 10;

/// Names of algorithms, the fastest first.
const ALGORITHMS: [&str; 13] = [
    "xxh3_64", "xxh128", "xxh3_128", "xxh64", "xxh32", "sha1", "md5", "blake2b", "sha512",
    "sha384", "sha256", "sha224", "blake2s",
];

/// Compares the file with the hashes that are stated for it.
///
/// # Errors
/// [`PrepareError::ShardDigest`], and [`DataError::Io`].
pub(crate) fn verify(path: &Path, hashes: &BTreeMap<String, String>) -> Result<(), PrepareError> {
    let stated = ALGORITHMS.iter().find_map(|name| hashes.get_key_value(*name));
    let Some((algorithm, expected)) = stated else { return Ok(()) };
    let Some(found) = of_file(path, algorithm).map_err(PrepareError::io("read shard", path))?
    else {
        return Ok(());
    };
    if !found.eq_ignore_ascii_case(expected) {
        let (path, algorithm) = (path.to_owned(), algorithm.clone());
        let expected = expected.clone();
        return Err(PrepareError::ShardDigest { path, algorithm, expected, found });
    }
    Ok(())
}

/// The hash of a file, in hexadecimal digits; none of an unknown algorithm.
fn of_file(path: &Path, algorithm: &str) -> std::io::Result<Option<String>> {
    let mut file = tidemill_files::open(path)?;
    Ok(Some(match algorithm {
        "md5" => by_digest::<Md5>(&mut file)?,
        "sha1" => by_digest::<Sha1>(&mut file)?,
        "sha224" => by_digest::<Sha224>(&mut file)?,
        "sha256" => by_digest::<Sha256>(&mut file)?,
        "sha384" => by_digest::<Sha384>(&mut file)?,
        "sha512" => by_digest::<Sha512>(&mut file)?,
        "blake2b" => by_digest::<Blake2b512>(&mut file)?,
        "blake2s" => by_digest::<Blake2s256>(&mut file)?,
        "xxh32" => {
            let mut hasher = Xxh32::new(0);
            blocks(&mut file, |block| hasher.update(block))?;
            format!("{:08x}", hasher.digest())
        }
        "xxh64" => {
            let mut hasher = Xxh64::new(0);
            blocks(&mut file, |block| hasher.update(block))?;
            format!("{:016x}", hasher.digest())
        }
        "xxh3_64" => {
            let mut hasher = Xxh3::new();
            blocks(&mut file, |block| hasher.update(block))?;
            format!("{:016x}", hasher.digest())
        }
        "xxh3_128" | "xxh128" => {
            let mut hasher = Xxh3::new();
            blocks(&mut file, |block| hasher.update(block))?;
            format!("{:032x}", hasher.digest128())
        }
        _ => return Ok(None),
    }))
}

fn by_digest<D: Digest>(file: &mut File) -> std::io::Result<String> {
    let mut hasher = D::new();
    blocks(file, |block| hasher.update(block))?;
    let mut digits = String::new();
    for byte in hasher.finalize().iter() {
        write!(digits, "{byte:02x}").expect("a string takes everything");
    }
    Ok(digits)
}

fn blocks(file: &mut File, mut take: impl FnMut(&[u8])) -> std::io::Result<()> {
    let mut block = vec![0; BLOCK_BYTES];
    loop {
        match file.read(&mut block)? {
            0 => return Ok(()),
            length => take(&block[..length]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_python() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "abc").unwrap();
        for (algorithm, expected) in [
            ("md5", "900150983cd24fb0d6963f7d28e17f72"),
            ("sha1", "a9993e364706816aba3e25717850c26c9cd0d89d"),
            ("sha256", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
            ("sha224", "23097d223405d8228642a477bda255b32aadbce4bda0b3f7e36c9da7"),
            (
                "sha384",
                "cb00753f45a35e8bb5a03d699ac65007272c32ab0eded1631a8b605a43ff5bed8086072ba1e7cc23\
                 58baeca134c825a7",
            ),
            (
                "sha512",
                "ddaf35a193617abacc417349ae20413112e6fa4e89a97ea20a9eeee64b55d39a2192992a274fc1a8\
                 36ba3c23a3feebbd454d4423643ce80e2a9ac94fa54ca49f",
            ),
            (
                "blake2b",
                "ba80a53f981c4d0d6a2797b69f12f6e94c212f14685ac4b74b12bb6fdbffa2d17d87c5392aab792d\
                 c252d5de4533cc9518d38aa8dbf1925ab92386edd4009923",
            ),
            ("blake2s", "508c5e8c327c14e2e1a72ba34eeb452f37458b209ed63a294d999b4c86675982"),
            ("xxh32", "32d153ff"),
            ("xxh64", "44bc2cf5ad770999"),
            ("xxh3_64", "78af5f94892f3950"),
            ("xxh3_128", "06b05ab6733a618578af5f94892f3950"),
        ] {
            assert_eq!(of_file(&path, algorithm).unwrap().unwrap(), expected, "{algorithm}");
        }
        let stated = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect()
        };
        let wrong = stated(&[("md5", "900150983cd24fb0d6963f7d28e17f73"), ("sha3_256", "0")]);
        let error = verify(&path, &wrong).unwrap_err().to_string();
        assert!(error.contains("its md5 is 900150983cd24fb0d6963f7d28e17f72"), "{error}");
        verify(&path, &stated(&[("sha3_256", "0")])).unwrap();
        verify(&path, &stated(&[("xxh32", "32D153FF")])).unwrap();
    }
}
