import pytest

from bcd.config import Config, read


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(step_per_block=3), "did you mean 'steps_per_block'"),
        (dict(zzz=3), "no setting 'zzz'"),
        (dict(steps_per_block=0), "steps_per_block is 0"),
        (dict(active_blocks=0), "active_blocks is 0"),
        (dict(order="random"), "order is 'random'"),
        (dict(lr=-1.0), "lr is -1.0"),
        (dict(lr_schedule="cosine"), "set total_steps"),
        (dict(warmup_steps=5, total_steps=4), "warmup_steps is 5"),
        (dict(prefix_cache=dict(max_gb=0)), "prefix_cache.max_gb is 0"),
    ],
)
def test_bad_settings_are_one_line(values, message):
    with pytest.raises(ValueError, match=message) as caught:
        read(values)
    assert "\n" not in str(caught.value)


def test_read():
    assert read(None) == Config() == read({})
    assert read(dict(lr="2e-5")).lr == 2e-5
    assert read(dict(granularity=["a", "b"])).granularity == ("a", "b")
    config = Config(order="shuffled")
    assert read(config) is config
