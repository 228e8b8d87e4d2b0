"""Training jobs on tiny models that several tests share."""

import pytest

from disco.artifacts import SCRATCH
from disco.config import BlockDescent, Optimizer
from disco.job import Job, JobError, Price, run_job

PRICE = Price(priced_as="rtx4090", dollars_per_hour=0.36, source="a test", as_of="2026-01-01")


@pytest.fixture
def make_job(tmp_path, tiny_model, toy_rows):
    """make_job(name, **section) -> (Job, folder): a tiny model on toy rows."""

    def make(name, *, rows=None, model=None, trainable="all", aux=0.02, blocks=None, job_keys=None, **section):
        start = tmp_path / "start"
        if not start.exists():
            (model or tiny_model()).save_pretrained(start)
        out = tmp_path / name
        (out / SCRATCH).mkdir(parents=True)
        rows = rows or toy_rows()
        rows.save(out / SCRATCH / "rows.npz")
        defaults = {"batch_size": 4, "learning_rate": 3e-3, "log_every": 1, "weight_decay": 0.1}
        optimizer = Optimizer(**(defaults | section))
        job = Job(
            phase=name,
            stage="finetune",
            model=str(start),
            out=str(out),
            rows=str(out / SCRATCH / "rows.npz"),
            validation=str(out / SCRATCH / "rows.npz"),
            validate_at=[-(-len(rows) // optimizer.batch_size)],
            section=optimizer,
            bcd=None if blocks is None else BlockDescent(**blocks),
            trainable=trainable,
            aux_loss=aux,
            dtype="float32",
            experts="eager",
            seed=7,
            price=PRICE,
            run=str(tmp_path / "run"),
            group="test",
            **(job_keys or {}),
        )
        return job, out

    return make


def stop_at_checkpoint(job, out, step: int) -> None:
    """Run the job until its checkpoint of `step`, the second, cannot be written; the next run can write it."""
    blocked = out / SCRATCH / "checkpoints" / f"step-{step:08d}.partial"
    blocked.parent.mkdir()
    blocked.write_text("a file where a folder is wanted")
    with pytest.raises(JobError):
        run_job(job, threads=1)
    assert [path.name for path in blocked.parent.glob("step-*[0-9]")] == [f"step-{step // 2:08d}"]
    blocked.unlink()
