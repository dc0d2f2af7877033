"""`python -m tests.e2e.replay_worker TAPE ARGUMENT...`: `megarl.train` that keeps on a tape what its servers sampled.

A prompt that was sampled before at the same version is answered from the tape. SGLang samples anew after a restart, so
that this is how a resumed run can be compared with what it goes on from, bit for bit.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from megarl import cli, train
from megarl.rollout.client.sglang_client import RemoteSGLangEngine
from megarl.types import ModelRequest, ModelResponse


def main() -> None:
    tape = Path(sys.argv[1])
    lines = tape.read_text().splitlines() if tape.exists() else []
    known: dict[str, list[ModelResponse]] = {}
    for line in lines:
        key, answers = json.loads(line)
        known[key] = [ModelResponse(**answer) for answer in answers]
    real = RemoteSGLangEngine.agenerate_group

    async def agenerate_group(self: RemoteSGLangEngine, req: ModelRequest) -> list[ModelResponse]:
        key = f"{self.get_version()}: {req.input_ids} x {req.gconfig.n_samples}"
        if key not in known:
            known[key] = await real(self, req)
            with tape.open("a") as file:
                file.write(json.dumps([key, [dataclasses.asdict(answer) for answer in known[key]]]) + "\n")
        return known[key]

    RemoteSGLangEngine.agenerate_group = agenerate_group  # type: ignore[method-assign]
    sys.argv = ["megarl.train", *sys.argv[2:]]
    cli.run_command(train.main)


if __name__ == "__main__":
    main()
