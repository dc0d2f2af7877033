"""`python -m tests.e2e.replay_worker TAPE ARGUMENT...`: `megarl.train` that keeps on a tape what its servers sampled.

A prompt that was sampled before at the same version is answered from the tape. SGLang samples anew after a restart, so
that this is how a resumed run can be compared with what it goes on from, bit for bit.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from megarl import cli, train
from megarl.rollout.client.requests import CompletionPart
from megarl.rollout.client.sglang_client import RemoteSGLangEngine


def main() -> None:
    tape = Path(sys.argv[1])
    lines = tape.read_text().splitlines() if tape.exists() else []
    known: dict[str, list[CompletionPart]] = {}
    for line in lines:
        key, pieces = json.loads(line)
        known[key] = [CompletionPart(**piece) for piece in pieces]
    real = RemoteSGLangEngine._post

    async def post(
        self: RemoteSGLangEngine, input_ids: list[int], params: list[dict[str, Any]]
    ) -> list[CompletionPart]:
        key = f"{self.get_version()}: {input_ids} x {len(params)}"
        if key not in known:
            known[key] = await real(self, input_ids, params)
            with tape.open("a") as file:
                file.write(json.dumps([key, [dataclasses.asdict(piece) for piece in known[key]]]) + "\n")
        return known[key]

    RemoteSGLangEngine._post = post  # type: ignore[method-assign]
    sys.argv = ["megarl.train", *sys.argv[2:]]
    cli.run_command(train.main)


if __name__ == "__main__":
    main()
