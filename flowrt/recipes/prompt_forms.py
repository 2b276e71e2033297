"""The format of the prompt of a sample: that of its data set, or that of the run."""

from bisect import bisect_right
from itertools import accumulate

from flowrt.engines.prompts import PromptFormat
from flowrt.ids import data_set_of
from flowrt.recipes.config import RunConfig
from flowrt.recipes.data.mixture import largest_remainder
from flowrt.recipes.data_sets import set_data
from flowrt.recipes.eval_names import eval_data_sets, evaluated_row, first_number, first_number_of


class PromptForms:
    """The formats of the prompts of a run, by the numbers of prompts."""

    def __init__(self, config: RunConfig) -> None:
        """Raises ConfigError for a format that cannot be read."""
        data = config.data
        self._of_run = data.prompt_format
        self._trained = [set_data(data, set_).prompt_format for set_ in data.sets]
        self._evaluated = {
            first_number(name): set_data(data, data_set).prompt_format
            for name, data_set in eval_data_sets(config).items()
        }
        # The held-out rows follow each other in the order of the sets.
        shares = largest_remainder(data.eval_prompts, [set_.weight for set_ in data.sets]) if data.sets else []
        self._held_out_ends = list(accumulate(shares))

    def trained(self, number: int) -> PromptFormat:
        """The format of the training prompt with this number."""
        return self._trained[data_set_of(number)] if self._trained else self._of_run

    def evaluated(self, number: int) -> PromptFormat:
        """The format of the evaluation prompt with this number."""
        if (own := self._evaluated.get(first_number_of(number))) is not None:
            return own
        if not self._trained:
            return self._of_run
        return self._trained[bisect_right(self._held_out_ends, evaluated_row(number))]
