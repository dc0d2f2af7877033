"""A taskset of verifiers: sums, scored by a rubric of two rewards."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        return float(len(trace.last_reply) < 5)


class SumConfig(vf.TasksetConfig):
    count: int = 3


class Sums(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for i in range(self.config.count):
            yield SumTask(SumData(prompt=f"{i}+1=?", system_prompt="Add.", answer=str(i + 1)), self.config.task)


__all__ = ["Sums"]
