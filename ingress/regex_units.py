"""What the engine needs for each of its steps, in nanoseconds, from above for a quiet machine.

Found by searching texts in which one kind of step is nearly all there is, with CPython 3.11 (docs/ingress.md
has the method and the figures); `bench regex` shows the bounds made of them beside real searches.
"""

START_NS = 10.0
LITERAL_NS = 3.0
LITERAL_TAIL_NS = 1.0
CLASS_NS = 4.5
CATEGORY_NS = 11.0
CLASS_ITEM_NS = 5.0
FOLDED_NS = 12.0
FOLDED_WIDE_NS = 24.0
ANCHOR_NS = 6.0
SCAN_LITERAL_NS = 1.6
SCAN_ANY_NS = 1.3
SCAN_CLASS_NS = 3.3
SCAN_CATEGORY_NS = 6.0
REPEAT_ONE_NS = 20.0
EXIT_NS = 9.5
LAZY_NS = 12.0
REPEAT_NS = 22.0
UNTIL_NS = 14.0
MARK_NS = 4.0
BRANCH_NS = 12.0
ALTERNATIVE_NS = 10.0
LOOK_NS = 22.0
