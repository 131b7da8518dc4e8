"""The cost of filtering documents with datatrove: megabytes of text for each CPU second of one process.

    pip install datatrove==0.10.1 'xxhash<4' spacy tokenizers
    python benches/peers/choosing.py DOCUMENTS.jsonl [MEGABYTES]

`cargo bench -p tidemill-streaming-data --bench choosing -- DOCUMENTS.jsonl [MEGABYTES]` measures Tidemill on the
same documents.
"""

import json
import resource
import sys
import tempfile

from datatrove.data import Document
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
from datatrove.pipeline.filters import C4QualityFilter, FineWebQualityFilter
from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter
from datatrove.utils.hashing import HashConfig
from datatrove.utils.text import split_into_parts


def documents(path, most):
    texts, size = [], 0
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            text = json.loads(line)["text"]
            size += len(text.encode())
            texts.append(text)
            if size >= most:
                break
    return texts, size


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(name, texts, size, work):
    split_into_parts.cache_clear()
    before = cpu_seconds()
    kept = work(texts)
    spent = cpu_seconds() - before
    print(f"{name:24} {size / 1e6 / spent:10.2f} MB/s   kept {kept} of {len(texts)}", flush=True)


def filtered(rules):
    def work(texts):
        verdicts = (rules.filter(Document(text=text, id="")) for text in texts)
        return sum(verdict is True for verdict in verdicts)
    return work


def signed(texts):
    config = MinhashConfig(hash_config=HashConfig(precision=64, hash_fc="xxhash"), n_grams=5,
                           num_buckets=14, hashes_per_bucket=8)
    with tempfile.TemporaryDirectory() as folder:
        step = MinhashDedupSignature(output_folder=folder, config=config)
        step.run((Document(text=text, id=str(at)) for at, text in enumerate(texts)), 0, 1)
    return len(texts)


def main():
    most = float(sys.argv[2]) * 1e6 if len(sys.argv) > 2 else 1e12
    texts, size = documents(sys.argv[1], most)
    # The first text makes spaCy build its tables.
    filtered(GopherQualityFilter())(texts[:1])
    measure("gopher", texts, size, filtered(GopherQualityFilter()))
    measure("repetition", texts, size, filtered(GopherRepetitionFilter()))
    measure("c4", texts, size, filtered(C4QualityFilter()))
    measure("fineweb", texts, size, filtered(FineWebQualityFilter()))
    measure("near: signatures", texts, size, signed)


if __name__ == "__main__":
    main()
