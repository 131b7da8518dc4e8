"""Documents to measure preparing with, as JSON lines in files of 32 MB: sources, English text, or made-up documents.

    python benches/peers/corpora.py rust OUTPUT ~/.cargo/registry/src [--cut 2000] [--several] [--without windows-sys]
    python benches/peers/corpora.py english OUTPUT ~/.cargo/registry/src FOLDER...
    python benches/peers/corpora.py made OUTPUT --documents 10000000

Documents are ordered by path and nothing is random, so the same files give the same documents. `rust` takes every
`*.rs`; with `--cut`, a document ends at the first line end after that many characters, and with `--several` only crates
with several versions are taken. `--without` leaves out crates whose names begin with a given prefix (`windows-sys` is
tens of megabytes of generated declarations). `english` takes `*.md`, `*.rst`,
`*.txt` of folders called `_sources` (where Sphinx keeps its inputs), `*.pod`, and the documentation in each `*.rs`:
comments that begin with `///` or `//!`.

`made` writes documents of 60 words from a vocabulary of 50,000, with frequencies by Zipf's law with exponent 1; a document depends
only on its number. Of ten consecutive documents one copies the text of an earlier document anywhere in the set, and two copy an
earlier text with one word changed: they share 51 of 61 runs of five words, a Jaccard similarity of 0.836.
"""

import argparse
import collections
import json
import pathlib
import re

FILE_BYTES = 32_000_000
LEAST_CHARACTERS = 200
WORDS = 60
VOCABULARY = 50_000
# Documents generated at once.
BATCH = 50_000


class Writer:
    """JSON lines, in files of FILE_BYTES."""

    def __init__(self, folder):
        folder.mkdir(parents=True)
        self.folder, self.file, self.size = folder, None, FILE_BYTES
        self.files = self.documents = self.text_bytes = 0

    def write(self, text, path=None):
        if self.size >= FILE_BYTES:
            self.close()
            self.file = open(self.folder / f"{self.files:04}.jsonl", "w", encoding="utf-8")
            self.files, self.size = self.files + 1, 0
        document = {"text": text} if path is None else {"path": path, "text": text}
        line = json.dumps(document, ensure_ascii=False)
        self.file.write(line + "\n")
        self.size += len(line)
        self.documents += 1
        self.text_bytes += len(text.encode())

    def close(self):
        if self.file:
            self.file.close()

    def report(self):
        self.close()
        megabytes = self.text_bytes / 1e6
        print(f"{self.folder}: {self.documents} documents, {megabytes:.1f} MB of text, {self.files} files")


def texts(folders, wanted):
    """The wanted files below the folders that are UTF-8: path and text."""
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if not wanted(path) or path.is_symlink() or not path.is_file():
                continue
            try:
                yield str(path.relative_to(folder.parent)), path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def cut(text, least):
    """The text in parts, each of which ends at the first line end after `least` characters."""
    begin = 0
    while begin < len(text):
        end = text.find("\n", begin + least)
        end = len(text) if end < 0 else end + 1
        yield text[begin:end]
        begin = end


def several(folders):
    """Folders of crates that are present in several versions."""
    versions = collections.defaultdict(list)
    for folder in folders:
        for crate in folder.glob("*/*/" if folder.name == "src" else "*/"):
            versions[re.sub(r"-[0-9].*", "", crate.name)].append(crate)
    return sorted(crate for crates in versions.values() if len(crates) > 1 for crate in crates)


def rust(writer, folders, least, without):
    def wanted(path):
        return path.suffix == ".rs" and not any(part.startswith(without) for part in path.parts)

    for path, text in texts(folders, wanted):
        for at, part in enumerate(cut(text, least) if least else [text]):
            writer.write(part, f"{path}#{at}" if least else path)


def is_english(path):
    is_source = path.suffix == ".txt" and "_sources" in path.parts
    return path.suffix in (".md", ".rst", ".pod", ".rs") or is_source


def english(writer, folders):
    comment = re.compile(r"^[ \t]*//[/!](?!/) ?(.*)$", re.MULTILINE)
    for path, text in texts(folders, is_english):
        if path.endswith(".rs"):
            text = "\n".join(comment.findall(text))
        if len(text) >= LEAST_CHARACTERS:
            writer.write(text, path)


def mix(numpy, x):
    """splitmix64 of each number."""
    x = x + numpy.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return x ^ (x >> numpy.uint64(31))


def made(writer, documents):
    import numpy

    def draw(numbers):
        """Places in the vocabulary, log-uniform."""
        uniform = (mix(numpy, numbers) >> numpy.uint64(11)).astype(numpy.float64) / 2.0**53
        return numpy.minimum(VOCABULARY**uniform - 1, VOCABULARY - 1).astype(numpy.int64)

    # The digits of a number in a base of 35, a syllable each.
    syllables = [first + second for first in "bdfklmn" for second in "aeiou"]
    vocabulary = []
    for word in range(VOCABULARY):
        rest, text = word, ""
        while True:
            rest, digit = divmod(rest, len(syllables))
            text += syllables[digit]
            if rest == 0:
                break
        vocabulary.append(text + "st"[len(text) // 2 % 2])
    places = numpy.arange(WORDS, dtype=numpy.uint64)
    for first in range(0, documents, BATCH):
        numbers = numpy.arange(first, min(first + BATCH, documents), dtype=numpy.uint64)
        kinds = numbers % numpy.uint64(10)
        # The original of a copy: one of the first seven documents in an earlier row of ten.
        rows = numbers // numpy.uint64(10)
        drawn = mix(numpy, numbers ^ numpy.uint64(0x5EED))
        row = drawn % numpy.maximum(rows, numpy.uint64(1))
        original = row * numpy.uint64(10) + (drawn >> numpy.uint64(40)) % numpy.uint64(7)
        is_copy = (kinds >= 7) & (rows > 0)
        sources = numpy.where(is_copy, original, numbers)
        words = draw(sources[:, None] * numpy.uint64(WORDS) + places)
        changed = numpy.flatnonzero(is_copy & (kinds >= 8))
        # A word in the middle, so that five runs change, becomes the next word of the vocabulary, which always differs.
        column = (drawn[changed] >> numpy.uint64(20)) % numpy.uint64(WORDS - 8) + numpy.uint64(4)
        words[changed, column] = (words[changed, column] + 1) % VOCABULARY
        for row in words.tolist():
            writer.write(" ".join([vocabulary[word] for word in row]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["rust", "english", "made"])
    parser.add_argument("output", type=pathlib.Path, help="a folder that is not there")
    parser.add_argument("folders", type=pathlib.Path, nargs="*", help="where sources or texts are")
    parser.add_argument("--cut", type=int, help="characters behind which a document ends")
    parser.add_argument("--several", action="store_true", help="only crates of which several versions are there")
    parser.add_argument("--without", nargs="*", default=[], help="beginnings of names of crates")
    parser.add_argument("--documents", type=int, default=10_000_000)
    arguments = parser.parse_intermixed_args()
    if arguments.kind != "made" and not arguments.folders:
        parser.error("expected folders with sources or texts")
    writer = Writer(arguments.output)
    if arguments.kind == "rust":
        rust(writer, several(arguments.folders) if arguments.several else arguments.folders, arguments.cut,
             tuple(arguments.without))
    elif arguments.kind == "english":
        english(writer, arguments.folders)
    else:
        made(writer, arguments.documents)
    writer.report()


if __name__ == "__main__":
    main()
