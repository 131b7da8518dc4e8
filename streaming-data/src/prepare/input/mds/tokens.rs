//! Arrays of numbers to tokens, in the form in which MDS stores NumPy arrays.
//!
//! `ndarray` has its type and shape in every sample, `ndarray:int32` its shape, `ndarray:int32:2049`
//! neither. Samples of old data sets are `bytes`: 64-bit integers and nothing else.

use std::{path::Path, sync::Arc};

use crate::prepare::{
    PrepareError,
    input::{
        Documents, Entry, Take,
        skip::Place,
        values::{Value, Values},
    },
};

/// How tokens are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TokenEncoding {
    /// The type of an element; none where every sample states its own.
    element: Option<Element>,
    shape: Shape,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    /// Every sample states its own.
    InSample,
    /// All have one axis of this length.
    Fixed(usize),
    /// One axis, whose length follows from the sample's bytes.
    Bare,
}

/// A type of integers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Element {
    bytes: usize,
    is_signed: bool,
}

/// Types of integers by their names in an encoding and their numbers in a sample.
const ELEMENTS: [(&str, u8, Element); 8] = [
    ("uint8", 8, Element { bytes: 1, is_signed: false }),
    ("int8", 9, Element { bytes: 1, is_signed: true }),
    ("uint16", 16, Element { bytes: 2, is_signed: false }),
    ("int16", 17, Element { bytes: 2, is_signed: true }),
    ("uint32", 32, Element { bytes: 4, is_signed: false }),
    ("int32", 33, Element { bytes: 4, is_signed: true }),
    ("uint64", 64, Element { bytes: 8, is_signed: false }),
    ("int64", 65, Element { bytes: 8, is_signed: true }),
];

impl TokenEncoding {
    /// The encoding of this name, where it is of integers on one axis.
    pub(crate) fn by_name(name: &str) -> Option<TokenEncoding> {
        let of_name = |wanted: &str| {
            let found = ELEMENTS.iter().find(|(name, ..)| *name == wanted);
            found.map(|(_, _, element)| *element)
        };
        if name == "bytes" {
            return Some(TokenEncoding { element: of_name("int64"), shape: Shape::Bare });
        }
        let mut parts = name.split(':');
        if parts.next() != Some("ndarray") {
            return None;
        }
        let element = match parts.next() {
            Some(name) => Some(of_name(name)?),
            None => None,
        };
        let shape = match parts.next() {
            Some(length) => Shape::Fixed(length.parse().ok()?),
            None => Shape::InSample,
        };
        Some(TokenEncoding { element, shape })
    }

    /// The numbers of a sample; the error describes a sample that is no array of them.
    fn numbers<'a>(
        &self,
        sample: &'a [u8],
    ) -> Result<impl ExactSizeIterator<Item = i128> + use<'a>, String> {
        let mut rest = sample;
        let element = match self.element {
            Some(element) => element,
            None => {
                let number = first(&mut rest, 1)?[0];
                let found = ELEMENTS.iter().find(|(_, known, _)| *known == number);
                found.ok_or_else(|| format!("an array of type {number}"))?.2
            }
        };
        let length = match self.shape {
            Shape::Fixed(length) => length,
            Shape::Bare if rest.len().is_multiple_of(element.bytes) => rest.len() / element.bytes,
            Shape::Bare => return Err(format!("{} bytes", rest.len())),
            Shape::InSample => {
                let axes = first(&mut rest, 1)?[0];
                let (axes, axis_bytes) = (axes >> 2, 1 << (axes & 3));
                if axes != 1 {
                    return Err(format!("an array of {axes} axes"));
                }
                let mut length = [0; 8];
                length[..axis_bytes].copy_from_slice(first(&mut rest, axis_bytes)?);
                usize::try_from(u64::from_le_bytes(length)).unwrap_or(usize::MAX)
            }
        };
        if length.checked_mul(element.bytes) != Some(rest.len()) {
            return Err(format!("{} bytes for an array of {length} numbers", rest.len()));
        }
        Ok(rest.chunks_exact(element.bytes).map(move |bytes| element.number(bytes)))
    }
}

impl Element {
    fn number(self, bytes: &[u8]) -> i128 {
        let is_negative = self.is_signed && bytes.last().is_some_and(|&byte| byte >= 0x80);
        let mut all = if is_negative { [0xff; 8] } else { [0; 8] };
        all[..bytes.len()].copy_from_slice(bytes);
        if self.is_signed {
            i128::from(i64::from_le_bytes(all))
        } else {
            i128::from(u64::from_le_bytes(all))
        }
    }
}

/// Takes the first bytes off.
fn first<'a>(rest: &mut &'a [u8], bytes: usize) -> Result<&'a [u8], String> {
    let (taken, behind) =
        rest.split_at_checked(bytes).ok_or_else(|| "an array that ends early".to_owned())?;
    *rest = behind;
    Ok(taken)
}

/// Consecutive samples of tokens.
pub(crate) struct TokenSamples {
    pub path: Arc<Path>,
    pub values: Values,
    pub encoding: TokenEncoding,
    /// Tokens that each must have.
    pub row_tokens: usize,
}

impl TokenSamples {
    /// Tokens of the first sample.
    ///
    /// # Errors
    /// [`PrepareError::Sample`] where it is no array of integers, or too short for a row.
    pub(crate) fn first_length(&self) -> Result<usize, PrepareError> {
        let (place, sample) = match self.values.iter().next() {
            Some((place, Value::Bytes(sample))) => (place, sample),
            Some((place, Value::Broken(reason))) => {
                let found = format!("that {reason}");
                return Err(self.wrong(place, found, "an array of tokens".to_owned()));
            }
            Some((place, Value::Null)) => {
                return Err(self.wrong(place, "a null".to_owned(), "a sample".to_owned()));
            }
            None => {
                let place = Place::Sample(0);
                return Err(self.wrong(place, "nothing".to_owned(), "a sample".to_owned()));
            }
        };
        let numbers = self.encoding.numbers(sample).map_err(|found| self.no_array(place, found))?;
        match numbers.len() {
            length @ (0 | 1) => {
                Err(self.wrong(place, format!("{length} tokens"), "at least 2".to_owned()))
            }
            length => Ok(length),
        }
    }

    fn no_array(&self, place: Place, found: String) -> PrepareError {
        self.wrong(place, found, "an array of integers on one axis".to_owned())
    }

    fn wrong(&self, place: Place, found: String, expected: String) -> PrepareError {
        PrepareError::Sample { path: self.path.to_path_buf(), place, found, expected }
    }
}

impl Documents for TokenSamples {
    fn visit(&self, take: &mut Take<'_>) -> Result<(), PrepareError> {
        let mut tokens = Vec::with_capacity(self.row_tokens);
        self.values.iter().try_for_each(|(place, value)| {
            let sample = match value {
                Value::Bytes(sample) => sample,
                Value::Null => return take(place, Entry::Null),
                Value::Broken(reason) => return take(place, Entry::Broken(reason)),
            };
            let numbers =
                self.encoding.numbers(sample).map_err(|found| self.no_array(place, found))?;
            if numbers.len() != self.row_tokens {
                let expected = format!("{} as in the first sample", self.row_tokens);
                return Err(self.wrong(place, format!("{} tokens", numbers.len()), expected));
            }
            tokens.clear();
            for number in numbers {
                let token = u32::try_from(number).ok().filter(|&token| token < i32::MAX as u32);
                tokens.push(token.ok_or_else(|| PrepareError::SampleToken {
                    path: self.path.to_path_buf(),
                    place,
                    token: number,
                    vocab_size: i32::MAX as u64,
                })?);
            }
            take(place, Entry::Tokens(&tokens))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(encoding: &str, sample: &[u8]) -> Result<Vec<i128>, String> {
        TokenEncoding::by_name(encoding).unwrap().numbers(sample).map(Iterator::collect)
    }

    #[test]
    fn arrays_of_every_type_and_shape() {
        assert_eq!(numbers("ndarray:uint8", &[4, 2, 7, 255]), Ok(vec![7, 255]));
        assert_eq!(numbers("ndarray:int8:2", &[7, 255]), Ok(vec![7, -1]));
        assert_eq!(numbers("ndarray:uint16", &[4, 1, 2, 1]), Ok(vec![258]));
        assert_eq!(numbers("ndarray", &[17, 5, 1, 0, 0xfe, 0xff]), Ok(vec![-2]));
        assert_eq!(numbers("ndarray:int32:1", &[0, 0, 0, 0x80]), Ok(vec![-(1 << 31)]));
        assert_eq!(numbers("ndarray:uint32:1", &[0, 0, 0, 0x80]), Ok(vec![1 << 31]));
        assert_eq!(numbers("bytes", &[9, 0, 0, 0, 0, 0, 0, 0]), Ok(vec![9]));
        assert_eq!(numbers("ndarray:uint64:1", &[0xff; 8]), Ok(vec![u64::MAX.into()]));
        for (encoding, sample, part) in [
            ("ndarray:int32", &[8, 1, 1, 0, 0, 0, 0][..], "2 axes"),
            ("ndarray:int32", &[4, 2, 0, 0, 0, 0], "4 bytes for an array of 2"),
            ("ndarray:int32", &[7, 1], "ends early"),
            ("ndarray:int32", &[7, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff], "0 bytes for"),
            ("ndarray", &[34, 4, 1, 0, 0, 0, 0], "type 34"),
            ("ndarray", &[], "ends early"),
            ("ndarray:int32:3", &[0; 8], "8 bytes for an array of 3"),
            ("bytes", &[0; 9], "9 bytes"),
        ] {
            let found = numbers(encoding, sample).unwrap_err();
            assert!(found.contains(part), "{encoding}: {found}");
        }
        for name in ["ndarray:float32", "ndarray:int32:2,3", "str", "json", "list[int]"] {
            assert_eq!(TokenEncoding::by_name(name), None, "{name}");
        }
    }
}
