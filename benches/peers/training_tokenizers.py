"""Trains a byte-level BPE with `tidemill tokenizer` and with Hugging Face's `tokenizers`, alternately, and checks that `transformers`
opens the first and gives the program's ids.

    pip install tokenizers transformers pyarrow
    python benches/peers/training_tokenizers.py DOCUMENTS [--vocab-size 32000] [--rounds 3] [--megabytes 60]

DOCUMENTS is a folder of `corpora.py`: the program trains on all of it, and both train alternately on the first megabytes. Both have
GPT-2's splitter, the 256 bytes as alphabet and one special token. Seconds are CPU seconds (user and system, all threads and processes)
from start to end of the process; a separate run measures only the start of Python and the reading of lines.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

from preparing import first_megabytes, measured, text_of

END = "<|endoftext|>"

PEER = """
import json, sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
documents, size, output = sys.argv[1:]
texts = (json.loads(line)["text"] for line in open(documents, encoding="utf-8"))
if output == "-":
    print(sum(map(len, texts)))
    sys.exit()
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=int(size), min_frequency=2, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet,
                              show_progress=False)
tokenizer.train_from_iterator(texts, trainer)
tokenizer.save(output)
"""


def merges(path):
    model = json.loads(pathlib.Path(path).read_text())["model"]
    return [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in model["merges"]]


def same_ids(program, tokenizer, documents, folder):
    """Whether the program writes the ids of `transformers`; prints how many were compared."""
    import pyarrow.parquet
    from transformers import AutoTokenizer

    command = [program, "prepare", "--input", documents, "--output", f"{folder}/set", "--tokenizer", tokenizer, "--seq-len", "2048"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    home = pathlib.Path(folder) / "opened"
    home.mkdir()
    (home / "tokenizer.json").write_bytes(pathlib.Path(tokenizer).read_bytes())
    opened = AutoTokenizer.from_pretrained(home)
    end = opened.convert_tokens_to_ids(END)
    expected = []
    for line in open(documents, encoding="utf-8"):
        expected += opened(json.loads(line)["text"], add_special_tokens=False)["input_ids"] + [end]
    found = []
    for shard in json.loads((pathlib.Path(folder) / "set" / "index.json").read_text())["shards"]:
        for row in pyarrow.parquet.read_table(f"{folder}/set/{shard['file']}")["tokens"].to_pylist():
            # A row begins with the last token of the row before.
            assert not found or found[-1] == row[0], "rows do not follow each other"
            found += row[1:] if found else row
    compared = min(len(found), len(expected))
    is_same = found == expected[: len(found)] and len(expected) - len(found) < 2048
    print(f"transformers opens it as {type(opened).__name__}; {compared} ids of {documents.name} are {'the same' if is_same else 'OTHERS'}")
    if not is_same:
        at = next(at for at in range(compared) if found[at] != expected[at])
        print(f"at {at}: {found[at - 5 : at + 5]} and {expected[at - 5 : at + 5]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", type=pathlib.Path)
    parser.add_argument("--tidemill", default="target/release/tidemill")
    parser.add_argument("--vocab-size", type=int, default=32_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=float, default=60)
    arguments = parser.parse_args()
    count, size = text_of(arguments.documents)
    with tempfile.TemporaryDirectory() as folder:
        subset = pathlib.Path(folder, "first.jsonl")
        first_megabytes(arguments.documents, arguments.megabytes, subset)
        subset_size = sum(len(json.loads(line)["text"].encode()) for line in open(subset, encoding="utf-8"))
        print(f"{arguments.documents}: {count} documents, {size / 1e6:.1f} MB; of them {subset_size / 1e6:.1f} MB by turns", flush=True)
        ours = [arguments.tidemill, "tokenizer", "--vocab-size", str(arguments.vocab_size), "--output"]
        peer = [sys.executable, "-c", PEER]
        arms = {
            "tidemill, one thread": lambda out: [*ours, out, "-w", "1", "--input", subset],
            "tidemill, two threads": lambda out: [*ours, out, "-w", "2", "--input", subset],
            "tokenizers": lambda out: [*peer, subset, str(arguments.vocab_size), out],
            "tokenizers, one thread": lambda out: ["env", "RAYON_NUM_THREADS=1", *peer, subset, str(arguments.vocab_size), out],
            "Python that reads the lines": lambda out: [*peer, subset, "0", "-"],
            "tidemill, one thread, all documents": lambda out: [*ours, out, "-w", "1", "--input", arguments.documents],
        }
        runs = {name: [] for name in arms}
        trained = {}
        for at in range(arguments.rounds):
            for number, (name, command) in enumerate(arms.items()):
                trained[name] = pathlib.Path(folder, f"{number}-{at}.json")
                runs[name].append(measured([str(part) for part in command(trained[name])])[0])
        print("\n| | CPU seconds (least to most) | MB for each | seconds of the clock | memory, MB |\n|" + "---|" * 5)
        for name, found in runs.items():
            cpu, clock, memory = (sorted(run[key] for run in found) for key in ("cpu", "clock", "memory"))
            middle = statistics.median(cpu)
            megabytes = (size if name.endswith("all documents") else subset_size) / 1e6
            spread = f"{middle:.2f} ({cpu[0]:.2f} to {cpu[-1]:.2f})"
            cells = f"{megabytes / middle:.1f} | {statistics.median(clock):.1f} | {statistics.median(memory) / 1e6:.0f}"
            print(f"| {name} | {spread} | {cells} |")
        one, two, theirs = (merges(trained[name]) for name in ("tidemill, one thread", "tidemill, two threads", "tokenizers"))
        common = next((at for at, (a, b) in enumerate(zip(one, theirs)) if a != b), min(len(one), len(theirs)))
        print(f"one and two threads: {'the same' if one == two else 'OTHER'} merges; the first {common} of {len(one)} are those of "
              f"tokenizers, and {len(set(one) & set(theirs))} are among its {len(theirs)}")
        few = pathlib.Path(folder, "few.jsonl")
        first_megabytes(arguments.documents, 4, few)
        same_ids(arguments.tidemill, trained["tidemill, one thread, all documents"], few, folder)


if __name__ == "__main__":
    main()
