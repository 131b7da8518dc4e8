"""`tidemill prepare` beside datatrove and text-dedup, step by step and by turns: text for each second of a CPU, clock, memory.

    python benches/peers/preparing.py DOCUMENTS [--tokenizer tokenizer.json] [--filter NAMES] [--rounds 3] [--peer-megabytes 10]
        [--choosing EXECUTABLE]

DOCUMENTS is a folder of `corpora.py`. The program gets all of it, peers the first megabytes, as documents in memory (the
program's seconds include starting, reading and writing; the peers' do not). `removing.py` lists the packages of the peers. Each
round runs every arm once; the table has medians, and the ratio to the peer with the same task. Seconds are CPU seconds (user and
system, all threads), so that other users of the machine matter little; wall-clock seconds are beside them. The
executable of `cargo bench --bench choosing`, if given, runs once a round, and its phases get rows of their own.
"""

import argparse
import collections
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

FILTER = "gopher,repetition,c4"


def measured(command):
    """Runs a program to its end: CPU seconds, wall-clock seconds, peak bytes of memory, and its output."""
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


def peer(step, documents, tokenizer, names):
    script = pathlib.Path(__file__).with_name("removing.py")
    command = [sys.executable, script, step, documents]
    _, printed = measured([*command, "--filter", names, *(["--tokenizer", tokenizer] if tokenizer else [])])
    found = json.loads(printed.splitlines()[-1])
    return found | {"kept": len(found["kept"])}


def phases(executable, documents):
    """Megabytes of text for each CPU second of each phase of finding near copies, and of each set of filters."""
    _, printed = measured([executable, documents])
    found = {}
    for line in printed.splitlines():
        if near := re.match(r"dedup Near: reading and comparing (\S+) MB/s, sorting (\S+) s, reading again and packing bytes (\S+)", line):
            found["phase: reading and comparing"] = float(near[1])
            found["phase: reading again and packing bytes"] = float(near[3])
        elif rules := re.match(r"([a-z0-9,-]+) +(\S+) MB/s   kept", line):
            found[f"phase: filter {rules[1]}"] = float(rules[2])
    return found


def first_megabytes(documents, megabytes, output):
    """Writes the first documents of the folder, up to `megabytes` of text."""
    size = 0
    with open(output, "w", encoding="utf-8") as copy:
        for file in sorted(documents.glob("*.jsonl")):
            for line in open(file, encoding="utf-8"):
                copy.write(line)
                size += len(json.loads(line)["text"].encode())
                if size >= megabytes * 1e6:
                    return


def text_of(documents):
    """The number of documents, and the bytes of their texts."""
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
    parser.add_argument("--choosing", type=pathlib.Path)
    arguments = parser.parse_args()
    near, chosen, one = ["--dedup", "near"], ["--filter", arguments.filter], ["-w", "1"]
    tokens = ["--tokenizer", arguments.tokenizer] if arguments.tokenizer else []
    # The task, the program's flags, and the peer with the same task.
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
    runs, rates_of_phases = collections.defaultdict(list), collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        subset = f"{folder}/first.jsonl"
        first_megabytes(arguments.documents, arguments.peer_megabytes, subset)
        if arguments.choosing:
            first_megabytes(arguments.documents, 1e9, f"{folder}/all.jsonl")
        for _ in range(arguments.rounds):
            if arguments.choosing:
                for name, found in phases(arguments.choosing, f"{folder}/all.jsonl").items():
                    rates_of_phases[name].append(found)
            for at in range(max(len(arms), len(peers))):
                if at < len(peers):
                    runs[peers[at]].append(peer(peers[at], subset, arguments.tokenizer, arguments.filter))
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
    signatures = rate("datatrove-signatures")
    for name, found in rates_of_phases.items():
        ratio = f"{statistics.median(found) / signatures:.0f} x its signatures" if name.endswith("comparing") else ""
        print(f"| {name} | {statistics.median(found):.1f} ({min(found):.1f} to {max(found):.1f}) | | | | {ratio} |")


if __name__ == "__main__":
    main()
