"""Compares `tidemill evaluate` with lm-eval, request by request.

Makes small random checkpoints of several families, gives both programs the same questions, and compares every
log-likelihood, every greedy match, and each metric with its standard error. lm-eval's own task definitions are used as they
are; only the data sets behind them are replaced by local rows.

    pip install lm_eval torch transformers
    python benches/peers/evaluating.py --tidemill target/release/tidemill --tokenizer tokenizer.json \
        --questions FOLDER [--limit 40]

FOLDER has question files in LLM Foundry's layout (its scripts/eval/local_data): lambada_openai, piqa, arc_easy,
arc_challenge, openbook_qa, winogrande and copa as .jsonl. Rows of hellaswag and boolq are made up here.
"""

import argparse
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

# Errors of perplexities are drawn in this process, and are not compared.
os.environ["DISABLE_MULTIPROC"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

import datasets
import lm_eval
import torch
import transformers
from lm_eval.models.huggingface import HFLM

TASKS = [
    "lambada_openai", "hellaswag", "piqa", "arc_easy", "arc_challenge", "winogrande", "openbookqa", "boolq", "copa",
]
# lm-eval's data set of each task, the split with the questions, and the folder in which tidemill looks for it.
SOURCES = {
    "EleutherAI/lambada_openai": ("lambada_openai", "test"),
    "Rowan/hellaswag": ("hellaswag", "validation"),
    "baber/piqa": ("piqa", "validation"),
    "allenai/ai2_arc ARC-Easy": ("arc_easy", "test"),
    "allenai/ai2_arc ARC-Challenge": ("arc_challenge", "test"),
    "allenai/winogrande winogrande_xl": ("winogrande", "validation"),
    "allenai/openbookqa main": ("openbookqa", "test"),
    "aps/super_glue boolq": ("boolq", "validation"),
    "aps/super_glue copa": ("copa", "validation"),
}
# The largest difference of two log-likelihoods of fp32 models.
TOLERANCE = 1e-4


def labelled(row):
    labels = [chr(ord("A") + index) for index in range(len(row["choices"]))]
    return {"choices": {"text": row["choices"], "label": labels}, "answerKey": labels[row["gold"]]}


def question(row):
    return row["query"].removeprefix("Question: ")


def winogrande(row):
    one, two = row["context_options"]
    shared = os.path.commonprefix([one, two])
    shared = shared[: shared.rfind(" ") + 1]
    return {
        "sentence": f"{shared}_ {row['continuation']}",
        "option1": one.removeprefix(shared),
        "option2": two.removeprefix(shared),
        "answer": str(row["gold"] + 1),
    }


def copa(row):
    premise, connector = row["query"].rsplit(", ", 1)
    first, second = (choice[0].upper() + choice[1:] for choice in row["choices"])
    asked = {"because": "cause", "therefore": "effect"}[connector]
    return {"premise": premise + ". ", "question": asked, "choice1": first, "choice2": second, "label": row["gold"]}


def hellaswag(index):
    endings = [
        "puts the [step] lid  on the jar [title] and turns it.", " sings   to the crowd",
        "is of course größer than the other.", "[substeps] falls asleep [un\nclosed].",
    ]
    return {
        "activity_label": ["Making jam", "Home and Garden"][index % 2],
        "ctx_a": f"[header] How to make jam number {index} [title] Wash the fruit.  Dry it",
        "ctx_b": ["", "the Woman in red", "ÉTIENNE then"][index % 3],
        "endings": endings[index % 4:] + endings[: index % 4],
        "label": str(index % 4),
    }


def boolq(index):
    return {
        "passage": f"Mills grind grain. Mill number {index} stands by the sea and turns with the tide.",
        "question": ["does the mill turn with the tide", "is the mill in the mountains"][index % 2],
        "label": (index + 1) % 2,
    }


FROM_FOUNDRY = {
    "lambada_openai": ("lambada_openai", lambda row: {"text": f"{row['context']} {row['continuation']}"}),
    "piqa": ("piqa", lambda row: {
        "goal": question(row).rstrip("\n"), "sol1": row["choices"][0], "sol2": row["choices"][1], "label": row["gold"],
    }),
    "arc_easy": ("arc_easy", lambda row: {"question": question(row), **labelled(row)}),
    "arc_challenge": ("arc_challenge", lambda row: {"question": question(row), **labelled(row)}),
    "openbookqa": ("openbook_qa", lambda row: {"question_stem": row["query"], **labelled(row)}),
    "winogrande": ("winogrande", winogrande),
    "copa": ("copa", copa),
}


def rows_of(name, questions, limit):
    """Questions of a task, then one more row for few-shot examples."""
    if name in FROM_FOUNDRY:
        file, convert = FROM_FOUNDRY[name]
        lines = (questions / f"{file}.jsonl").read_text().splitlines()[: limit + 1]
        return [convert(json.loads(line)) for line in lines]
    return [{"hellaswag": hellaswag, "boolq": boolq}[name](index) for index in range(limit + 1)]


def checkpoints(folder, tokenizer):
    """Random models whose predictions differ much from token to token."""
    vocab = json.loads(tokenizer.read_text())
    size = 1 + max([*vocab["model"]["vocab"].values(), *(token["id"] for token in vocab["added_tokens"])])
    shared = {"vocab_size": size, "bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.2}
    configs = {
        # Few enough positions to cut the beginning of some contexts.
        "gpt-neo": transformers.GPTNeoConfig(
            hidden_size=64, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=32,
            max_position_embeddings=96, resid_dropout=0, embed_dropout=0, attention_dropout=0, **shared,
        ),
        "mamba": transformers.MambaConfig(
            hidden_size=48, num_hidden_layers=2, state_size=8, tie_word_embeddings=True, **shared,
        ),
        "llama": transformers.LlamaConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
            max_position_embeddings=2048, tie_word_embeddings=False, **shared,
        ),
    }
    for name, config in configs.items():
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(config).float()
        path = folder / name
        model.save_pretrained(path)
        shutil.copy(tokenizer, path / "tokenizer.json")
        (path / "tokenizer_config.json").write_text(json.dumps({
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>",
        }))
        yield name, path


def of_lm_eval(model, shots):
    """Log-likelihoods and greedy matches by task, question and option, and the results."""
    # lambada_openai has questions but no examples.
    tasks = [task for task in TASKS if shots == 0 or task != "lambada_openai"]
    found = lm_eval.simple_evaluate(
        model=HFLM(pretrained=str(model), device="cpu", dtype="float32", batch_size=8), tasks=tasks, num_fewshot=shots,
        log_samples=True, bootstrap_iters=2,
    )
    answers = {
        (task, sample["doc_id"], option): answer
        for task, samples in found["samples"].items()
        for sample in samples
        for option, [answer] in enumerate(sample["resps"])
    }
    return tasks, answers, found["results"]


def of_tidemill(program, model, data, tasks, shots, output):
    command = [
        program, "evaluate", "--model", model, "--tasks", ",".join(tasks), "--data", data, "--fewshot", str(shots),
        "--output", output, "--backend", "cpu", "--format", "json",
    ]
    printed = subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE).stdout
    lines = [json.loads(line) for line in output.read_text().splitlines()[1:]]
    answers = {(line["task"], line["question"], line["option"]): line for line in lines}
    return answers, json.loads(printed)["tasks"]


def compare(name, shots, theirs, ours):
    tasks, answers, results = theirs
    our_answers, our_results = ours
    assert answers.keys() == our_answers.keys(), (len(answers), len(our_answers))
    differences, greedy = [], 0
    for key, [log_likelihood, is_greedy] in answers.items():
        differences.append((abs(log_likelihood - our_answers[key]["log_likelihood"]), key))
        if our_answers[key]["greedy"] is not None:
            greedy += is_greedy != our_answers[key]["greedy"]
    largest, where = max(differences)
    wrong = [difference for difference in differences if not difference[0] <= TOLERANCE]
    metrics = 0
    for task in tasks:
        for metric, value in our_results[task]["metrics"].items():
            pairs = [(results[task][f"{metric},none"], value["value"])]
            # lm-eval estimates the error of a perplexity from bootstrap samples, which are not drawn here.
            if metric != "perplexity":
                pairs.append((results[task][f"{metric}_stderr,none"], value["standard_error"]))
            bound = 1e-9 if metric != "perplexity" else 1e-5 * abs(value["value"])
            for expected, found in pairs:
                if not math.isclose(expected, found, rel_tol=1e-9, abs_tol=bound):
                    wrong.append((task, metric, expected, found))
                metrics += 1
    print(
        f"{name}, {shots} shots: {len(answers)} log-likelihoods, largest difference {largest:.2e} at {where}; "
        f"{greedy} greedy matches differ; {metrics} metrics and errors; {len(wrong)} wrong"
    )
    for difference in wrong[:10]:
        print("  wrong:", difference)
    return not wrong and not greedy


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tidemill", type=pathlib.Path, required=True)
    parser.add_argument("--tokenizer", type=pathlib.Path, required=True)
    parser.add_argument("--questions", type=pathlib.Path, required=True)
    parser.add_argument("--limit", type=int, default=40)
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        rows = {}
        for name, split in SOURCES.values():
            # The examples are equal, so the random choice and order of examples do not matter.
            *asked, example = rows_of(name, arguments.questions, arguments.limit)
            rows[name] = {split: asked, "train": [example, example]}
            (folder / "data" / name).mkdir(parents=True)
            for part, of_part in rows[name].items():
                lines = "".join(json.dumps(row) + "\n" for row in of_part)
                (folder / "data" / name / f"{part}.jsonl").write_text(lines)

        def load_dataset(path, name=None, **_):
            known = SOURCES.get(f"{path} {name}") or SOURCES[path]
            parts = {part: datasets.Dataset.from_list(of_part) for part, of_part in rows[known[0]].items()}
            # Splits that a task names but does not use.
            for part in ("test", "validation"):
                parts.setdefault(part, parts["train"])
            return datasets.DatasetDict(parts)

        datasets.load_dataset = load_dataset
        agree = True
        for name, path in checkpoints(folder, arguments.tokenizer):
            for shots in (0, 1):
                theirs = of_lm_eval(path, shots)
                output = folder / f"{name}-{shots}.jsonl"
                ours = of_tidemill(arguments.tidemill, path, folder / "data", theirs[0], shots, output)
                agree &= compare(name, shots, theirs, ours)
    sys.exit(0 if agree else 1)


if __name__ == "__main__":
    main()
