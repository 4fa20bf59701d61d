"""Prompt texts of about so many tokens, the same for the same key and new for another.

Owns: PromptWriter, Calibration. Runs in: load tool. Must not know: HTTP, arrival times, what a request looks like.
Words are short and frequent, so that most tokenizers make one token of each with its space.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

_TEXT = (
    "water house river stone light night morning winter summer garden window table paper letter number story music "
    "color green black white small large early later under above before after again never always often today place "
    "point world family people child mother father friend teacher doctor school church market street field forest "
    "mountain island ocean bridge train horse bird fish tree leaf grass fire wind rain snow cloud storm earth gold "
    "silver iron glass wood cloth bread sugar salt milk meat fruit apple wheat plant seed road wall door roof floor "
    "room line circle square corner front back side north south east west left right open close start stop turn "
    "move walk stand hold carry bring give take make build break cut draw write read speak hear look think know "
    "learn teach help work play rest sleep wake eat drink cook wash clean fill push pull send keep find lose win "
    "begin follow lead change grow"
)
WORDS = _TEXT.split()

PROBE_WORDS = (64, 320)  # two lengths tell tokens a word from tokens a request
MAX_TOKENS_PER_WORD = 8.0  # beyond this, what was counted were no words of the probe


@dataclass(frozen=True)
class Calibration:
    """What the server makes of our words: tokens = overhead_tokens + tokens_per_word * words."""

    tokens_per_word: float = 1.0
    overhead_tokens: float = 0.0  # start token, chat template
    source: str = "assumed: a token a word"  # for reports

    def num_words(self, tokens: float) -> int:
        """Words for so many tokens of text (overhead apart), at least one."""
        return max(1, round(tokens / self.tokens_per_word))


ASSUMED = Calibration()


def calibrate(count_tokens: Callable[[str], int | None], how: str) -> Calibration:
    """Measure with two probe texts. `count_tokens` asks the server for the tokens of a prompt, None when it does not tell.

    Returns ASSUMED when it does not tell or the counts make no sense: lengths are then approximate, as `source` says.
    """
    counts = []
    for num_words in PROBE_WORDS:
        count = count_tokens(text_of_words(num_words, f"calibration:{num_words}"))
        if count is None:
            return ASSUMED
        counts.append(count)
    per_word = (counts[1] - counts[0]) / (PROBE_WORDS[1] - PROBE_WORDS[0])
    overhead = counts[0] - per_word * PROBE_WORDS[0]
    if not 0.0 < per_word <= MAX_TOKENS_PER_WORD or overhead < -PROBE_WORDS[0]:
        return Calibration(
            source=f"assumed: a token a word (the server counted {counts[0]} and {counts[1]} for {PROBE_WORDS} words)"
        )
    return Calibration(per_word, max(0.0, overhead), f"{how}: {per_word:.3f} tokens a word, {max(0.0, overhead):.0f} a request")


def text_of_words(num_words: int, key: str) -> str:
    """`num_words` words drawn by `key` alone."""
    return " ".join(random.Random(key).choices(WORDS, k=num_words))  # noqa: S311 - not for secrets


@dataclass(frozen=True)
class PromptWriter:
    """Writes texts of wanted lengths. `salt` goes into every key: with a new one no prefix of an earlier run comes again."""

    salt: str
    calibration: Calibration = ASSUMED

    def part(self, tokens: float, *key: object) -> str:
        """A text of about `tokens` tokens, drawn by the salt and the key. No overhead is taken off."""
        return text_of_words(self.calibration.num_words(tokens), self._key(*key))

    def prompt(self, tokens: int, *key: object, shared_tokens: int = 0) -> str:
        """A whole prompt of about `tokens` tokens with the request's overhead in them.

        Its first `shared_tokens` are the same for all prompts of this salt; at least one word is the prompt's own.
        """
        num_words = self.calibration.num_words(tokens - self.calibration.overhead_tokens)
        num_shared = min(self.calibration.num_words(shared_tokens), num_words - 1) if shared_tokens else 0
        own = text_of_words(num_words - num_shared, self._key(*key))
        return f"{text_of_words(num_shared, self._key('shared'))} {own}" if num_shared else own

    def _key(self, *key: object) -> str:
        return ":".join([self.salt, *map(str, key)])
