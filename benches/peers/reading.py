"""Samples a second of StreamingDataset and of `tidemill bench data`, alternately, from shards of the same samples.

40,000 samples of 2,049 int32 tokens, Zipf with exponent 1.2 over a vocabulary of 50,257: MDS shards of 64 MiB for
StreamingDataset (uncompressed and local, its fastest case), the output of `tidemill prepare` for them, and 8 Parquet shards
with pyarrow's defaults. Both sides shuffle and read batches of 64; StreamingDataset runs with several shuffles and numbers of
loader processes, and its best counts.

    pip install mosaicml-streaming==0.13.0 pyarrow
    python benches/peers/reading.py --folder /tmp/samples --tidemill target/release/tidemill
"""

import argparse
import json
import pathlib
import subprocess
import time

import numpy

SAMPLES = 40_000
ROW = 2_049
BATCH = 64
WINDOW = 4_096
VOCABULARY = 50_257


def rows(rng, count):
    """`count` rows of tokens by Zipf's law; a token's number does not depend on its frequency."""
    permutation = numpy.random.default_rng(7).permutation(VOCABULARY).astype(numpy.int32)
    drawn = rng.zipf(1.2, count * ROW * 2)
    return permutation[drawn[drawn < VOCABULARY][: count * ROW]].reshape(count, ROW)


def make(folder, tidemill):
    import pyarrow
    import pyarrow.parquet
    from streaming import MDSWriter

    rng = numpy.random.default_rng(1)
    with MDSWriter(out=str(folder / "mds"), columns={"tokens": "ndarray:int32"}, size_limit=1 << 26) as writer:
        for shard in range(8):
            tokens = rows(rng, SAMPLES // 8)
            for row in tokens:
                writer.write({"tokens": row})
            offsets = numpy.arange(0, len(tokens) + 1, dtype=numpy.int32) * ROW
            table = pyarrow.table({"tokens": pyarrow.ListArray.from_arrays(offsets, tokens.reshape(-1))})
            path = folder / "pyarrow" / f"shard-{shard:05}.parquet"
            path.parent.mkdir(exist_ok=True)
            pyarrow.parquet.write_table(table, path, compression="zstd")
    command = [tidemill, "prepare", "--input", folder / "mds", "--output", folder / "prepared"]
    command += ["--vocab-size", str(VOCABULARY), "--shard-samples", str(SAMPLES // 8)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def streaming_dataset(folder, shuffle, workers):
    """Samples a second of the second epoch, and milliseconds until the first batch of the first epoch."""
    import streaming
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    streaming.base.util.clean_stale_shared_memory()
    begun = time.perf_counter()
    how = {"shuffle": False} if shuffle == "none" else {"shuffle": True, "shuffle_algo": shuffle}
    data_set = StreamingDataset(local=str(folder), batch_size=BATCH, shuffle_block_size=WINDOW, **how)
    batches = DataLoader(data_set, batch_size=BATCH, num_workers=workers, persistent_workers=workers > 0)
    first, rate = None, 0.0
    for _ in range(2):
        start, count = time.perf_counter(), 0
        for batch in batches:
            count += len(batch["tokens"])
            first = first or (time.perf_counter() - begun) * 1000
        rate = count / (time.perf_counter() - start)
    return {"samples_per_second": round(rate), "first_batch_ms": round(first)}


def tidemill_bench(tidemill, folder):
    command = [tidemill, "bench", "data", folder, "--batch", str(BATCH), "--window-samples", str(WINDOW)]
    options = ["--cache-mib", "128", "--seconds", "3", "--format", "json"]
    return json.loads(subprocess.run([*command, *options], check=True, capture_output=True).stdout)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="where the shards are, or are made")
    parser.add_argument("--tidemill", default="target/release/tidemill")
    arguments = parser.parse_args()
    folder = arguments.folder
    if not (folder / "prepared").exists():
        folder.mkdir(parents=True, exist_ok=True)
        make(folder, arguments.tidemill)
    best = {}
    for shuffle in ["py1e", "py1s", "py1br", "none"]:
        for workers in [0, 1, 2]:
            for shards in ["prepared", "pyarrow"]:
                found = tidemill_bench(arguments.tidemill, folder / shards)
                print(json.dumps({"tidemill": shards, **found}), flush=True)
                rate = found["samples_per_second"]
                best.setdefault(shards, []).append(rate)
            found = streaming_dataset(folder / "mds", shuffle, workers)
            print(json.dumps({"StreamingDataset": shuffle, "loaders": workers, **found}), flush=True)
            name = "StreamingDataset" if shuffle != "none" else "StreamingDataset, stored order"
            best.setdefault(name, []).append(found["samples_per_second"])
    peer = max(best["StreamingDataset"])
    for name, rates in best.items():
        rates.sort()
        print(f"{name}: best {rates[-1]:.0f}, median {rates[len(rates) // 2]:.0f}, {rates[-1] / peer:.1f} times the peer's best")


if __name__ == "__main__":
    main()
