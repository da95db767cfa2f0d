"""What the engine needs for each of its steps, in nanoseconds, from above for a quiet machine.

Found by searching texts in which one kind of step is nearly all there is, with CPython 3.11, 3.13 and 3.14;
`bench regex_units` does that again, `bench regex` shows the bounds made of them beside real searches.
"""

# To begin a search at a place: when the first look there fails, and when it does not.
SKIP_NS = 1.5
START_NS = 9.5
# To read a character of what a match must begin with, before one is tried.
PREFIX_NS = 2.0
# To look at one character in a run: what is compared, then the steps of a class.
SCAN_LITERAL_NS = 1.1
SCAN_ANY_NS = 0.9
SCAN_FOLDED_NS = 4.0
SCAN_FOLDED_SET_NS = 16.0
COPY_FOLDED_NS = 9.0
RANGE_NS = 2.8
MAP_NS = 3.1
BIG_MAP_NS = 3.6
NEGATE_NS = 2.2
FAILURE_NS = 2.0
FOLD_NS = 8.0
CATEGORY_ASCII_NS = 4.0
SPACE_NS = 4.8
SPACE_FAR_NS = 9.0
DIGIT_NS = 9.5
WORD_LETTER_NS = 6.9
WORD_DIGIT_NS = 12.2
WORD_OTHER_NS = 23.0
# Such a look as a step of its own, beside the look.
OP_NS = 1.0
ANCHOR_NS = 2.5
# A repeat of one class: to begin it, to try what follows after some count, to do so where it gives nothing
# back, to see that the literal that follows is not there, and a round of a lazy one.
REPEAT_ONE_NS = 8.0
EXIT_NS = 13.0
KEPT_EXIT_NS = 8.0
LITERAL_TAIL_NS = 1.15
LAZY_NS = 12.0
# Any other repeat: to begin it, a round that must be, to try one that may be, to try what follows.
REPEAT_NS = 18.0
ROUND_NS = 7.5
MORE_NS = 13.0
UNTIL_NS = 9.0
MARK_NS = 3.2
# What is kept at a choice until it is given up, in bytes, and what a byte takes: copied at once; where a loop
# keeps it round after round, from which number of bytes per round it leaves the caches, and from which the
# memory is fetched anew at each search.
KEPT_CONTEXT, KEPT_GROUP = 64, 16
COPIED_BYTE_NS = 0.25
CACHED_BYTES, STACK_BYTES = 192, 800
FAR_BYTE_NS, FRESH_BYTE_NS = 0.25, 1.5
# A choice, and each alternative that is tried.
BRANCH_NS = 5.0
ALTERNATIVE_NS = 12.5
LOOK_NS = 9.0
REFERENCE_NS = 8.0
