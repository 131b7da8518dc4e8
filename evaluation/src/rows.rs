//! Rows of a source: JSON lines, or Parquet of any columns, from a folder or a store.
//!
//! A source is named by a path below the data folder, by a full path or by a URL. Without the
//! ending `.jsonl` or `.parquet` both are tried, in that order. Files are read whole, as questions
//! are few.

use std::io;
use std::path::Path;

use bytes::Bytes;
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row as Record};
use serde_json::{Map, Value};
use tidemill_files::Kind;
use tidemill_streaming_data::store::{Location, RemoteFolder, StoreSettings};

use crate::error::{EvaluationError, Result};
use crate::template::Row;

/// The endings of files that are read.
const ENDINGS: [&str; 2] = [".jsonl", ".parquet"];

/// The rows of a file, in order.
#[derive(Clone, Debug)]
pub struct Rows {
    /// The file or URL.
    pub origin: String,
    /// The rows.
    pub rows: Vec<Row>,
    /// For each, the line or row of the file, from 1.
    numbers: Vec<usize>,
    format: Format,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    JsonLines,
    Parquet,
}

impl Rows {
    /// Reads the source `file` of the folder or URL `data`. `origin` says, for errors, where the
    /// file can be downloaded.
    ///
    /// # Errors
    /// No such file, one that is neither JSON lines nor Parquet, or a store that refuses.
    pub fn open(data: &str, file: &str, origin: Option<&str>) -> Result<Self> {
        let names: Vec<String> = match ENDINGS.iter().any(|ending| file.ends_with(ending)) {
            true => vec![file.to_owned()],
            false => ENDINGS.iter().map(|ending| format!("{file}{ending}")).collect(),
        };
        for name in &names {
            let (place, found) = fetch(data, name)?;
            if let Some(bytes) = found {
                let format =
                    if name.ends_with(".parquet") { Format::Parquet } else { Format::JsonLines };
                return Self::parse(place, bytes, format);
            }
        }
        let at = origin.map(|origin| format!("; download it from {origin}")).unwrap_or_default();
        let what =
            format!("expected {} in this folder, found no such file{at}", names.join(" or "));
        Err(EvaluationError::Source { origin: data.to_owned(), what })
    }

    /// The place of a row, such as `piqa.jsonl: line 3`.
    pub fn place(&self, index: usize) -> String {
        let word = match self.format {
            Format::JsonLines => "line",
            Format::Parquet => "row",
        };
        format!("{}: {word} {}", self.origin, self.numbers[index])
    }

    fn parse(origin: String, bytes: Bytes, format: Format) -> Result<Self> {
        let (numbers, rows) = match format {
            Format::JsonLines => json_lines(&origin, &bytes)?,
            Format::Parquet => parquet(&origin, bytes)?,
        };
        if rows.is_empty() {
            let what = "expected rows, found none".to_owned();
            return Err(EvaluationError::Source { origin, what });
        }
        Ok(Self { origin, rows, numbers, format })
    }
}

/// The bytes of a file, if it exists, and its place.
fn fetch(data: &str, name: &str) -> Result<(String, Option<Bytes>)> {
    let location = match Location::parse(name)? {
        url if url.local().is_none() => url,
        own if own.local().is_some_and(Path::is_absolute) => own,
        _ => Location::parse(data)?.join(name),
    };
    let place = location.to_string();
    if let Some(path) = location.local() {
        let found = match tidemill_files::read(path, Kind::Other) {
            Ok(bytes) => Some(Bytes::from(bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(source) => {
                let (action, path) = ("reading", path.to_owned());
                return Err(EvaluationError::File { action, path, source });
            }
        };
        return Ok((place, found));
    }
    let Some((folder, name)) = place.rsplit_once('/') else { return Ok((place, None)) };
    let folder = RemoteFolder::open(Location::parse(folder)?, &StoreSettings::default())?;
    let found = folder.get_if_there(name)?;
    Ok((place, found))
}

fn json_lines(origin: &str, bytes: &[u8]) -> Result<(Vec<usize>, Vec<Row>)> {
    let lines = bytes.split(|&byte| byte == b'\n').zip(1..);
    let lines = lines.filter(|(line, _)| !line.iter().all(u8::is_ascii_whitespace));
    let rows = lines.map(|(line, number)| match serde_json::from_slice::<Row>(line) {
        Ok(row) => Ok((number, row)),
        Err(error) => {
            let place = format!("{origin}: line {number}");
            let text = error.to_string();
            let said = text.split(" at line ").next().unwrap_or_default();
            let what = format!("expected a JSON object: {said} at column {}", error.column());
            Err(EvaluationError::row(&place, what))
        }
    });
    Ok(rows.collect::<Result<Vec<_>>>()?.into_iter().unzip())
}

fn parquet(origin: &str, bytes: Bytes) -> Result<(Vec<usize>, Vec<Row>)> {
    let wrong = |error: ParquetError| EvaluationError::Source {
        origin: origin.to_owned(),
        what: format!("expected a Parquet file: {error}"),
    };
    let reader = SerializedFileReader::new(bytes).map_err(wrong)?;
    let records = reader.get_row_iter(None).map_err(wrong)?;
    let rows = records.map(|record| record.map(|record| object(&record)).map_err(wrong));
    Ok((1..).zip(rows.collect::<Result<Vec<_>>>()?).unzip())
}

fn object(record: &Record) -> Map<String, Value> {
    record.get_column_iter().map(|(name, field)| (name.clone(), json(field))).collect()
}

/// A field in the form of JSON. A value that JSON cannot express (bytes, dates) becomes its own
/// text form.
fn json(field: &Field) -> Value {
    match field {
        Field::Null => Value::Null,
        Field::Bool(value) => (*value).into(),
        Field::Byte(value) => (*value).into(),
        Field::Short(value) => (*value).into(),
        Field::Int(value) => (*value).into(),
        Field::Long(value) => (*value).into(),
        Field::UByte(value) => (*value).into(),
        Field::UShort(value) => (*value).into(),
        Field::UInt(value) => (*value).into(),
        Field::ULong(value) => (*value).into(),
        Field::Float(value) => (*value).into(),
        Field::Double(value) => (*value).into(),
        Field::Str(text) => Value::String(text.clone()),
        Field::Group(record) => Value::Object(object(record)),
        Field::ListInternal(list) => list.elements().iter().map(json).collect(),
        other => Value::String(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;

    /// A file with the columns of ARC: a text, a list of texts in a group, and a number.
    fn parquet_file(path: &Path) {
        let schema = "message row { REQUIRED BYTE_ARRAY question (UTF8); \
             REQUIRED group choices { REQUIRED group text (LIST) { REPEATED group list { \
             REQUIRED BYTE_ARRAY element (UTF8); } } } REQUIRED INT64 label; }";
        let schema = Arc::new(parse_message_type(schema).expect("a schema"));
        let file = std::fs::File::create(path).expect("created");
        let mut writer = SerializedFileWriter::new(file, schema, Arc::default()).expect("opens");
        let mut group = writer.next_row_group().expect("a group");
        let texts = |texts: &[&str]| -> Vec<ByteArray> {
            texts.iter().map(|&text| ByteArray::from(text)).collect()
        };
        let mut column = group.next_column().expect("fine").expect("one");
        let questions = texts(&["Why?", "Größe?"]);
        column.typed::<ByteArrayType>().write_batch(&questions, None, None).expect("written");
        column.close().expect("closed");
        let mut column = group.next_column().expect("fine").expect("one");
        let choices = texts(&["a", "b", "c"]);
        let column_of_texts = column.typed::<ByteArrayType>();
        column_of_texts.write_batch(&choices, Some(&[1, 1, 1]), Some(&[0, 1, 0])).expect("written");
        column.close().expect("closed");
        let mut column = group.next_column().expect("fine").expect("one");
        column.typed::<Int64Type>().write_batch(&[1, 0], None, None).expect("written");
        column.close().expect("closed");
        group.close().expect("closed");
        writer.close().expect("closed");
    }

    #[test]
    fn parquet_is_read_as_json_lines_are() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(folder.path().join("arc")).expect("made");
        parquet_file(&folder.path().join("arc/test.parquet"));
        let lines = "\n{\"question\": \"Why?\", \"choices\": {\"text\": [\"a\", \"b\"]}, \"label\": 1}\n\n\
                     {\"question\": \"Größe?\", \"choices\": {\"text\": [\"c\"]}, \"label\": 0}\n";
        let data = folder.path().to_str().expect("UTF-8");
        let parquet = Rows::open(data, "arc/test", None).expect("read");
        assert!(parquet.place(1).ends_with("arc/test.parquet: row 2"), "{}", parquet.place(1));
        std::fs::write(folder.path().join("arc/test.jsonl"), lines).expect("written");
        // JSON lines come first, unless the ending is given.
        let json = Rows::open(data, "arc/test", None).expect("read");
        assert_eq!(json.rows, parquet.rows);
        assert!(json.place(1).ends_with("arc/test.jsonl: line 4"), "{}", json.place(1));
        assert_eq!(Rows::open(data, "arc/test.parquet", None).expect("read").rows, json.rows);
    }

    #[test]
    fn wrong_sources_are_told() {
        let folder = tempfile::tempdir().expect("a folder");
        let data = folder.path().to_str().expect("UTF-8");
        let wrong = |file| Rows::open(data, file, Some("the moon")).unwrap_err().to_string();
        let write =
            |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        let said = wrong("x");
        assert!(said.ends_with("found no such file; download it from the moon"), "{said}");
        assert!(said.contains("expected x.jsonl or x.parquet in this folder"), "{said}");
        write("x.jsonl", "{}\n[1]\n");
        let said = wrong("x");
        assert!(said.contains("x.jsonl: line 2: expected a JSON object: invalid type"), "{said}");
        write("x.jsonl", "{}\n{\"a\": 1\n");
        assert!(wrong("x").ends_with("EOF while parsing an object at column 7"), "{}", wrong("x"));
        write("x.jsonl", "\n \n");
        assert!(wrong("x").ends_with("x.jsonl: expected rows, found none"));
        write("y.parquet", "PAR1, not");
        assert!(wrong("y").contains("y.parquet: expected a Parquet file"), "{}", wrong("y"));
        std::fs::create_dir(folder.path().join("z.jsonl")).unwrap();
        assert!(wrong("z").starts_with("reading "), "{}", wrong("z"));
    }
}
