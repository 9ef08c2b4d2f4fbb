"""What an evaluation logs, and the best one of a run, over a resume."""

import math

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


def test_what_is_logged_of_text_and_of_labels():
    found = Evaluation(2.0, 1.5, {"accuracy": 0.5, "odd": math.nan}, {"wiki": 1.0})
    assert found.line() == {
        "heldout_bits_per_byte": 1.5,
        "heldout_loss": 2.0,
        "heldout_perplexity": math.exp(2.0),
        "heldout_loss/wiki": 1.0,
        "accuracy": 0.5,
    }
    assert Evaluation(800.0, 1.5).line()["heldout_perplexity"] is None
    assert Evaluation(2.0, math.inf, {"accuracy": 0.5}).line() == {"heldout_loss": 2.0, "accuracy": 0.5}
    assert found.labels()["loss/wiki"] == 1.0 and found.labels()["perplexity"] == math.exp(2.0)
