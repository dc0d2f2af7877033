"""A taskset of verifiers: sums of two digits, in the words of the bundled task."""

import re

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace) -> float:
        numbers = re.findall(r"\d+", trace.last_reply)
        return float(bool(numbers) and numbers[-1] == self.data.answer)


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for a in range(1, 10):
            for b in range(1, 10):
                prompt = f"Leo has {a} pens. Leo buys {b} more. How many pens?"
                yield SumTask(SumData(prompt=prompt, answer=str(a + b)), self.config.task)


__all__ = ["Sums"]
