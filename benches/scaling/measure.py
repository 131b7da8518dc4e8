"""Runs the jobs of jobs.py on the GPUs of this machine, in parallel while there are free GPUs; run.sh shows the usage."""

import argparse
import json
import os
import pathlib
import re
import subprocess
import time

from jobs import Job, all_jobs, finished

# A job that takes this many times its estimate hangs.
PATIENCE = 3


class Running:
    """A job that has been started on GPUs of its own."""

    def __init__(self, job: Job, devices: list[str], out: pathlib.Path):
        self.job, self.devices, self.started = job, devices, time.monotonic()
        self.log = out / (re.sub(r"[^a-z0-9.]+", "-", job.name) + ".log")
        self.file = self.log.open("w")
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(devices), "TIDEMILL_TEST_BACKEND": "cuda"}
        self.process = subprocess.Popen(
            job.command, stdout=self.file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )

    def result(self) -> dict | None:
        """The result line, or None while the job runs."""
        seconds = time.monotonic() - self.started
        if self.process.poll() is None:
            if seconds < PATIENCE * self.job.seconds + 60:
                return None
            os.killpg(self.process.pid, 9)
        code = self.process.wait()
        self.file.close()
        lines = self.log.read_text().splitlines()
        line = {"job": self.job.name, "gpus": self.job.gpus, "seconds": round(seconds, 1)}
        if code != 0:
            return line | {"failed": code, "said": lines[-3:]}
        said = [text for text in lines if text.startswith("{")]
        return line | {"result": [json.loads(text) for text in said] if self.job.result else lines[-3:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--program", required=True)
    parser.add_argument("--promises", help="the test program of the whole system")
    parser.add_argument("--gpus", type=int, help="the first so many alone; by default all that nvidia-smi lists")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="when to stop; no job is started that would be cut off"
    )
    parser.add_argument("--only", default="", help="a regular expression: jobs whose names it matches, and no others")
    arguments = parser.parse_args()
    began = time.monotonic()
    listed = subprocess.run(["nvidia-smi", "-L"], check=True, capture_output=True, text=True).stdout
    free = [str(index) for index in range(len(listed.splitlines()))][: arguments.gpus]
    out, program = arguments.out.resolve(), str(pathlib.Path(arguments.program).resolve())
    os.environ["TIDEMILL_PROGRAM"] = program
    results = out / "results.jsonl"
    done = finished(results)
    jobs = [
        job
        for job in all_jobs(program, arguments.promises, out, len(free))
        if job.name not in done and re.search(arguments.only, job.name)
    ]
    # Jobs with the most GPUs first, then the longest; small jobs fill the remaining GPUs.
    waiting = sorted(jobs, key=lambda job: (-job.gpus, -job.seconds))
    running: list[Running] = []
    while waiting or running:
        left = arguments.seconds - (time.monotonic() - began)
        for job in list(waiting):
            if job.seconds > left:
                waiting.remove(job)
                print(f"not started, {left:.0f} seconds are left: {job.name}", flush=True)
            elif job.gpus <= len(free):
                waiting.remove(job)
                running.append(Running(job, [free.pop(0) for _ in range(job.gpus)], out))
        time.sleep(0.2)
        for one in list(running):
            if line := one.result():
                running.remove(one)
                free = sorted(free + one.devices)
                with results.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                said = line.get("result", line.get("said"))
                rates = [f"{row['tokens_per_second']:.0f} tokens/s" for row in said if "tokens_per_second" in row]
                print(f"{line['seconds']:>6} s  {line['job']}  {' '.join(rates or map(str, said))}", flush=True)


main()
