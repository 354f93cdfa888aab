"""The progress bars of tqdm count and show the same for a wrapped model as for a plain one."""

import io

import pytest
from classification import both, classifier
from tqdm import tqdm
from tqdm.keras import TqdmCallback


class Bar(tqdm):
    """Notes the count, the total and the numbers of each update."""

    def __init__(self, **arguments):
        self.noted = []
        super().__init__(file=io.StringIO(), **arguments)

    def set_postfix(self, ordered_dict=None, refresh=True, **others):
        super().set_postfix(ordered_dict, refresh, **others)
        self.numbers = ordered_dict

    def update(self, n=1):
        super().update(n)
        self.noted.append((self.n, self.total, self.numbers))


def noted(wrapped, data, verbose):
    """Trains a model, and returns what the bar of epochs and then those of batches noted, and the text they ended with."""
    bars = []

    def bar(**arguments):
        bars.append(Bar(**arguments))
        return bars[-1]

    callback = TqdmCallback(verbose=verbose, tqdm_class=bar)
    classifier(wrapped).fit(*data, epochs=2, batch_size=7, validation_split=0.2, callbacks=[callback], verbose=0)
    return [update for bar in bars for update in bar.noted], [bar.postfix for bar in bars]


@pytest.mark.parametrize("verbose", [1, 2], ids=["one_bar_for_batches", "a_bar_for_each_epoch"])
def test_bars(verbose, data):
    (plain, texts), (parallel, other_texts) = both(lambda wrapped: noted(wrapped, data, verbose))
    counts = [(count, total) for count, total, _ in plain]
    assert counts == [(epoch, 2) for epoch in (1, 2)] + 2 * [(batch, 5) for batch in range(1, 6)]
    assert counts == [(count, total) for count, total, _ in parallel]
    for (_, _, expected), (_, _, received) in zip(plain, parallel, strict=True):
        assert received == pytest.approx(expected, rel=1e-4)
    assert "val_loss=" in texts[0]
    assert texts == other_texts
