"""Which near copies `tidemill prepare --dedup near`, datatrove and text-dedup find, against exact Jaccard similarities.

    python benches/peers/likeness.py DOCUMENTS.jsonl --tidemill target/release/tidemill

The similarity of two documents is the Jaccard similarity of their sets of runs of five words, with words normalized as by the program
(lower case, runs of digits as 0, split at everything that is no letter or digit). It is computed exactly for all pairs. `removing.py`
lists the packages of the peers. The first table has, by similarity, the share of pairs whose documents are in one bucket (Tidemill) or
in one component (all), and the theoretical share for 14 bands of 8 minima; the second has the similarity of dropped documents to the
most similar kept document.
"""

import argparse
import json
import pathlib
import re
import struct
import subprocess
import tempfile

import numpy
import scipy.sparse

import removing
from removing import BANDS, MINIMA, RUN_WORDS

EDGES = [0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 1.0]
LEAST = EDGES[0]


def runs(text, known):
    """The distinct runs of words of a text, as numbers."""
    words = [re.sub("[0-9]+", "0", word) for word in re.findall(r"[^\W_]+", text.lower())]
    if len(words) < RUN_WORDS:
        found = {tuple(words)} if words else set()
    else:
        found = set(zip(*(words[at:] for at in range(RUN_WORDS))))
    return [known.setdefault(run, len(known)) for run in found]


def similar_pairs(texts):
    """All pairs of documents with a similarity of LEAST or more, the first before the second, and their similarities."""
    known, columns, ends = {}, [], [0]
    for text in texts:
        columns += runs(text, known)
        ends.append(len(columns))
    sets = scipy.sparse.csr_matrix((numpy.ones(len(columns), numpy.int32), columns, ends), (len(texts), len(known)))
    sizes, turned = numpy.diff(ends), sets.T.tocsr()
    first, second, similarities = [], [], []
    for begin in range(0, len(texts), 500):
        common = (sets[begin : begin + 500] @ turned).tocoo()
        row, column = common.row + begin, common.col
        similarity = common.data / (sizes[row] + sizes[column] - common.data)
        wanted = (row < column) & (similarity >= LEAST)
        first.append(row[wanted]), second.append(column[wanted]), similarities.append(similarity[wanted])
    return tuple(numpy.concatenate(parts) for parts in (first, second, similarities))


class Components:
    """A union-find structure."""

    def __init__(self, count):
        self.parents = list(range(count))

    def find(self, at):
        while self.parents[at] != at:
            self.parents[at] = at = self.parents[self.parents[at]]
        return at

    def union(self, a, b):
        a, b = sorted((self.find(a), self.find(b)))
        self.parents[b] = a

    def labels(self):
        return numpy.array([self.find(at) for at in range(len(self.parents))])


def of_state(folder):
    """Place, bands and fate (0: kept, 1: a copy, 2: a near copy) of each document of an updatable data set."""
    def number():
        nonlocal at
        value, shift = 0, 0
        while True:
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return value

    index = json.loads((folder / "index.json").read_text())
    state = json.loads((folder / index["state"]["file"]).read_text())
    place = 0
    for part in state["parts"]:
        data, at = (folder / part["file"]).read_bytes(), 28
        tail = number()
        at += 4 * tail
        while at < len(data):
            tag, at = data[at], at + 1
            if tag == 0:  # The beginning of an input.
                number()
                length = number()
                at, place = at + length, 0
            elif tag == 1:  # The end of an input.
                at += 17
                for _ in range(5):
                    number()
            else:
                assert tag & 0b10100111 == 0b10100100, f"a record of another kind: {tag}"
                step = number()
                place += step
                at += 16 if tag & 1 << 6 else 32
                bands, fate = struct.unpack_from(f"<{BANDS}Q", data, at), tag >> 3 & 3
                at += 8 * BANDS
                if fate == 0:
                    number()
                yield place, bands, fate


def tidemill(program, path, count, folder):
    """The places of kept documents, and the bands of each document that has any."""
    command = [program, "prepare", "--input", path, "--output", f"{folder}/set", "--dedup", "near", "--updatable"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found = list(of_state(pathlib.Path(folder) / "set"))
    # Lines are counted from 1 or from 0; the first line of the file is a document.
    base = found[0][0]
    bands = [None] * count
    for place, of_document, _ in found:
        bands[place - base] = of_document
    return [place - base for place, _, fate in found if fate == 0], bands


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("documents", help="a file of JSON lines")
    parser.add_argument("--tidemill", default="target/release/tidemill")
    arguments = parser.parse_args()
    texts = removing.texts_of(arguments.documents)
    first, second, similarity = similar_pairs(texts)
    size = sum(len(text.encode()) for text in texts) / 1e6
    print(f"{len(texts)} documents, {size:.1f} MB; {len(first)} pairs with a similarity of {LEAST} or more")

    kept, found = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        kept["tidemill"], bands = tidemill(arguments.tidemill, arguments.documents, len(texts), folder)
        buckets = Components(len(texts))
        firsts = {}
        for place, of_document in enumerate(bands):
            for band in enumerate(of_document or ()):
                buckets.union(firsts.setdefault(band, place), place)
        shares = [bool(bands[a] and bands[b]) and any(map(int.__eq__, bands[a], bands[b])) for a, b in zip(first, second)]
        found["tidemill, in one bucket"] = numpy.array(shares)
        together = lambda labels: labels[first] == labels[second]
        found["tidemill, in one component"] = together(buckets.labels())
        kept["datatrove"] = removing.datatrove_near(texts, folder)
        pairs = Components(len(texts))
        for file in pathlib.Path(folder, "pairs").glob("*.dups"):
            for _, a, _, b in struct.iter_unpack("<4I", file.read_bytes()):
                pairs.union(a, b)
        found["datatrove, in one component"] = together(pairs.labels())
        kept["text-dedup"] = removing.text_dedup_near(arguments.documents, folder)
        from text_dedup.minhash import uf

        found["text-dedup, in one component"] = together(numpy.array([uf.find(at) for at in range(len(texts))]))

    bins = [(low, high) for low, high in zip(EDGES, EDGES[1:])] + [(1.0, 1.1)]
    inside = [(similarity >= low) & (similarity < high) for low, high in bins]
    print("\n| similarity | " + " | ".join(f"{low} to {high}" if high <= 1 else "1" for low, high in bins) + " |")
    print("|---" * (len(bins) + 1) + "|")
    print("| pairs | " + " | ".join(str(wanted.sum()) for wanted in inside) + " |")
    theory = 1 - (1 - similarity**MINIMA) ** BANDS
    for name, shares in [("theory", theory), *found.items()]:
        cells = [f"{shares[wanted].mean():.3f}" if wanted.any() else "" for wanted in inside]
        print(f"| {name} | " + " | ".join(cells) + " |")

    # The similarity of each dropped document to the most similar kept document.
    print("\n| | kept | dropped | most similar kept: 0.5 or more | 0.7 | 0.8 |")
    print("|---" * 6 + "|")
    for name, places in kept.items():
        is_kept = numpy.zeros(len(texts), bool)
        is_kept[places] = True
        most = numpy.zeros(len(texts))
        numpy.maximum.at(most, first, numpy.where(is_kept[second], similarity, 0))
        numpy.maximum.at(most, second, numpy.where(is_kept[first], similarity, 0))
        dropped = most[~is_kept]
        shares = " | ".join(f"{(dropped >= least).mean():.1%}" for least in (0.5, 0.7, 0.8))
        print(f"| {name} | {is_kept.sum()} | {len(dropped)} | {shares} |")
    sides = {name: set(places) for name, places in kept.items()}
    for other in ("datatrove", "text-dedup"):
        print(f"kept by tidemill and {other}: {len(sides['tidemill'] & sides[other])}")


if __name__ == "__main__":
    main()
