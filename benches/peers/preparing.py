"""`tidemill prepare` beside datatrove and text-dedup, step by step and by turns: text for each second of a CPU, clock, memory.

    python benches/peers/preparing.py DOCUMENTS [--tokenizer tokenizer.json] [--filter NAMES] [--rounds 3] [--peer-megabytes 10]

DOCUMENTS is a folder of `corpora.py`. The program gets all of it, peers the first megabytes of it, as documents in memory (the
program's seconds include starting, reading and writing; the peers' do not). What the peers need stands in `removing.py`. Each
round runs every arm once; the table has medians, and the ratio to the peer that does the same. Seconds are of the CPU (user and
system, all threads), so that they mean something on a machine that others use as well; the clock's stand beside them.
"""

import argparse
import collections
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

FILTER = "gopher,repetition,c4"


def measured(command):
    """Runs a program to its end: seconds of the CPU and the clock, bytes of memory at most, and what it printed."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f"{' '.join(map(str, command))} failed")
    cpu = usage.ru_utime + usage.ru_stime
    return {"cpu": cpu, "clock": time.perf_counter() - begun, "memory": usage.ru_maxrss * 1024}, printed


def tidemill(program, documents, flags):
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "prepare", "--input", documents, "--output", f"{folder}/set", "--seq-len", "2048", "--format", "json"]
        found, printed = measured([*command, *flags])
    report = json.loads(printed)
    return found | {"kept": report["documents"], "tokens": report["tokens"]}


def peer(step, documents, tokenizer):
    script = pathlib.Path(__file__).with_name("removing.py")
    command = [sys.executable, script, step, documents]
    _, printed = measured([*command, *(["--tokenizer", tokenizer] if tokenizer else [])])
    found = json.loads(printed.splitlines()[-1])
    return found | {"kept": len(found["kept"])}


def first_megabytes(documents, megabytes, output):
    """Writes the documents with which the folder begins, to so many megabytes of text."""
    size = 0
    with open(output, "w", encoding="utf-8") as copy:
        for file in sorted(documents.glob("*.jsonl")):
            for line in open(file, encoding="utf-8"):
                copy.write(line)
                size += len(json.loads(line)["text"].encode())
                if size >= megabytes * 1e6:
                    return


def text_of(documents):
    """Documents, and bytes of their texts."""
    lines = (line for file in sorted(documents.glob("*.jsonl")) for line in open(file, encoding="utf-8"))
    sizes = [len(json.loads(line)["text"].encode()) for line in lines]
    return len(sizes), sum(sizes)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", type=pathlib.Path)
    parser.add_argument("--tidemill", default="target/release/tidemill")
    parser.add_argument("--tokenizer", help="a tokenizer.json")
    parser.add_argument("--filter", default=FILTER)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-megabytes", type=float, default=10)
    arguments = parser.parse_args()
    near, chosen, one = ["--dedup", "near"], ["--filter", arguments.filter], ["-w", "1"]
    tokens = ["--tokenizer", arguments.tokenizer] if arguments.tokenizer else []
    # What it does, its flags, and the peer that does the same.
    arms = [
        ("read, pack bytes", [*one], None),
        ("and filter", [*chosen, *one], "datatrove-filter"),
        ("and leave out copies", ["--dedup", "exact", *one], None),
        ("and leave out near copies", [*near, *one], "datatrove-near"),
    ]
    if tokens:
        arms += [
            ("tokenize", [*tokens, *one], "tokenizers"),
            ("tokenize, leave out near copies", [*tokens, *near, *one], None),
            ("filter, leave out near copies, tokenize", [*tokens, *chosen, *near, *one], None),
            ("the same, two threads", [*tokens, *chosen, *near, "-w", "2"], None),
        ]
    peers = ["datatrove-signatures", "datatrove-near", "text-dedup-near", "datatrove-filter", *(["tokenizers"] if tokens else [])]
    count, size = text_of(arguments.documents)
    print(f"{arguments.documents}: {count} documents, {size / 1e6:.1f} MB of text", flush=True)
    runs = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        subset = f"{folder}/first.jsonl"
        first_megabytes(arguments.documents, arguments.peer_megabytes, subset)
        for _ in range(arguments.rounds):
            for at in range(max(len(arms), len(peers))):
                if at < len(peers):
                    runs[peers[at]].append(peer(peers[at], subset, arguments.tokenizer))
                if at < len(arms):
                    name, flags, _ = arms[at]
                    found = tidemill(arguments.tidemill, arguments.documents, flags)
                    runs[name].append(found | {"bytes": size})
                print(".", end="", file=sys.stderr, flush=True)

    def rate(name):
        return statistics.median(run["bytes"] / 1e6 / run["cpu"] for run in runs[name])

    print("\n| | MB for each CPU second (least to most) | seconds of the clock | memory, MB | kept | of the peer |\n|" + "---|" * 6)
    other = {name: of for name, _, of in arms}
    for name, found in runs.items():
        rates = sorted(run["bytes"] / 1e6 / run["cpu"] for run in found)
        clock, memory = (statistics.median(run[key] for run in found) for key in ("clock", "memory"))
        ratio = f"{rate(name) / rate(other[name]):.0f} x" if other.get(name) else ""
        spread = f"{rates[0]:.2f} to {rates[-1]:.2f}"
        print(f"| {name} | {rate(name):.2f} ({spread}) | {clock:.1f} | {memory / 1e6:.0f} | {found[0]['kept']} | {ratio} |")
    # What comparing costs is the difference of two runs of the program.
    seconds = {name: statistics.median(run["cpu"] for run in runs[name]) for name, _, _ in arms}
    for what, name in [("filtering", "and filter"), ("comparing", "and leave out near copies")]:
        spent = seconds[name] - seconds["read, pack bytes"]
        print(f"{what}: {spent:.2f} CPU seconds more than without, {size / 1e6 / spent:.0f} MB for each")
    if arguments.rounds and "datatrove-signatures" in runs:
        spent = seconds["and leave out near copies"] - seconds["read, pack bytes"]
        print(f"near copies beside datatrove's signatures alone: {size / 1e6 / spent / rate('datatrove-signatures'):.0f} x")


if __name__ == "__main__":
    main()
