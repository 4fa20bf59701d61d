"""The one error of the studies: a sentence for the person who ran the command.

Owns: StudyError. Runs in: load tool. Must not know: anything else.
"""


class StudyError(Exception):
    """The study cannot start, or cannot go on. Its text says what is wrong and what to do."""
