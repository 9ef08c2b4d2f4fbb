"""The best evaluation of a run, over a resume."""

from shardwise.train.best import Best
from shardwise.train.evaluate import Evaluation


def test_a_best_of_the_other_direction_is_no_start():
    lowest = Best("accuracy")
    lowest.is_better(Evaluation(1.0, 1.0, {"accuracy": 0.1}), 2)
    for direction, value in (("lowest", 0.1), ("highest", None)):
        then = Best("accuracy", direction)
        then.restore(lowest.state())
        assert then.value == value
    old = Best("accuracy")
    old.restore({"metric": "accuracy", "value": 0.5, "step": 1, "worse": 0})
    assert old.value == 0.5
