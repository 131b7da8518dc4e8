"""One preparation step of a peer, in a process of its own: its cost, and the kept documents.

    pip install datatrove==0.10.1 'xxhash<4' spacy tokenizers pyarrow 'datasets<6' click click-option-group rich scipy ftfy regex
    pip install --no-deps text-dedup==0.4.0
    python benches/peers/removing.py STEP DOCUMENTS.jsonl [--tokenizer tokenizer.json] [--filter gopher,repetition,c4]

STEP is `datatrove-signatures` (its first stage), `datatrove-near` (all four), `text-dedup-near`, `datatrove-filter` or `tokenizers`. Near
copies are found by 14 bands of 8 minima of runs of five words. The time excludes loading libraries and the first text, and includes
child processes. Prints JSON: CPU seconds, wall-clock seconds, bytes of text, peak memory, and the places of the kept documents.
"""

import argparse
import json
import os
import pathlib
import resource
import sys
import tempfile
import time

BANDS, MINIMA, RUN_WORDS = 14, 8, 5


def cpu_seconds():
    own, children = (resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def texts_of(path):
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def datatrove_near(texts, folder, stages=4):
    """Places of the documents that datatrove keeps, in one task."""
    from datatrove.data import Document
    from datatrove.pipeline.dedup.minhash import (MinhashConfig, MinhashDedupBuckets, MinhashDedupCluster,
                                                  MinhashDedupFilter, MinhashDedupSignature)
    from datatrove.utils.hashing import HashConfig

    config = MinhashConfig(hash_config=HashConfig(precision=64, hash_fc="xxhash"), n_grams=RUN_WORDS, num_buckets=BANDS,
                           hashes_per_bucket=MINIMA)
    signatures, pairs, removed = (str(pathlib.Path(folder) / name) for name in ("signatures", "pairs", "removed"))
    documents = (Document(text=text, id=str(at)) for at, text in enumerate(texts))
    MinhashDedupSignature(output_folder=signatures, config=config).run(documents, 0, 1)
    if stages == 1:
        return list(range(len(texts)))
    for band in range(BANDS):
        MinhashDedupBuckets(input_folder=signatures, output_folder=pairs, config=config).run(None, band, BANDS)
    MinhashDedupCluster(input_folder=pairs, output_folder=removed, config=config).run(None, 0, 1)
    documents = (Document(text=text, id=str(at)) for at, text in enumerate(texts))
    return [int(document.id) for document in MinhashDedupFilter(input_folder=removed).run(documents, 0, 1)]


def text_dedup_near(path, folder):
    """Places of the documents that text-dedup keeps, with one process."""
    os.environ["HF_DATASETS_CACHE"] = str(pathlib.Path(folder) / "cache")
    import datasets
    from text_dedup.minhash import main

    numbered = pathlib.Path(folder) / "numbered.jsonl"
    with open(path, encoding="utf-8") as lines, open(numbered, "w", encoding="utf-8") as copy:
        for at, line in enumerate(lines):
            copy.write(json.dumps({"place": at, "text": json.loads(line)["text"]}, ensure_ascii=False) + "\n")
    output = str(pathlib.Path(folder) / "kept")
    flags = ["--path", "json", "--data_files", str(numbered), "--split", "train", "--column", "text", "--output", output]
    flags += ["--cache_dir", str(pathlib.Path(folder) / "cache"), "--num_proc", "1", "--ngram", str(RUN_WORDS)]
    flags += ["--num_perm", str(BANDS * MINIMA), "--b", str(BANDS), "--r", str(MINIMA)]
    with open(os.devnull, "w") as nowhere:
        printed, sys.stdout = sys.stdout, nowhere
        try:
            main(flags, standalone_mode=False)
        finally:
            sys.stdout = printed
    return list(datasets.load_from_disk(output)["place"])


def datatrove_filter(texts, names):
    from datatrove.data import Document
    from datatrove.pipeline.filters import C4QualityFilter, FineWebQualityFilter
    from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter

    known = {"gopher": GopherQualityFilter, "repetition": GopherRepetitionFilter, "c4": C4QualityFilter,
             "fineweb": FineWebQualityFilter}
    rules = [known[name]() for name in names.split(",")]
    kept = []
    for at, text in enumerate(texts):
        document = Document(text=text, id=str(at))
        if all(rule.filter(document) is True for rule in rules):
            kept.append(at)
    return kept


def tokenize(texts, path):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    for first in range(0, len(texts), 64):
        tokenizer.encode_batch(texts[first : first + 64], add_special_tokens=False)
    return list(range(len(texts)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("step")
    parser.add_argument("documents")
    parser.add_argument("--tokenizer")
    parser.add_argument("--filter", default="gopher,repetition,c4")
    arguments = parser.parse_args()
    # One core, like the program's arms of one worker.
    os.environ.update(RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
    texts, warm = texts_of(arguments.documents), ["The tide turns the mill twice a day, and the miller sleeps. " * 9]
    with tempfile.TemporaryDirectory() as folder:
        steps = {
            "datatrove-signatures": lambda texts, at: datatrove_near(texts, f"{folder}/{at}", stages=1),
            "datatrove-near": lambda texts, at: datatrove_near(texts, f"{folder}/{at}"),
            "datatrove-filter": lambda texts, at: datatrove_filter(texts, arguments.filter),
            "tokenizers": lambda texts, at: tokenize(texts, arguments.tokenizer),
        }
        if arguments.step == "text-dedup-near":
            import datasets  # noqa: F401
            import text_dedup.minhash  # noqa: F401

            work = lambda: text_dedup_near(arguments.documents, folder)
        else:
            steps[arguments.step](warm * 3, "warm")
            if arguments.step.startswith("datatrove"):
                from datatrove.utils.text import split_into_parts

                split_into_parts.cache_clear()
            work = lambda: steps[arguments.step](texts, "all")
        clock, cpu = time.perf_counter(), cpu_seconds()
        kept = work()
        clock, cpu = time.perf_counter() - clock, cpu_seconds() - cpu
    memory = max(resource.getrusage(of).ru_maxrss for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) * 1024
    size = sum(len(text.encode()) for text in texts)
    print(json.dumps({"cpu": cpu, "clock": clock, "bytes": size, "memory": memory, "kept": kept}))


if __name__ == "__main__":
    main()
