"""Why a memory is exempt from a rule, where several are for the same reason."""

from __future__ import annotations

UNREAD = "only the class token is read, and the last layer's convolution reaches the patches alone"
SHARED = "one cache for all rows: the state of a row is empty, and the cache is a buffer, tested as such"
DROPPED = "what the last layer makes of the memory's tokens is dropped, so its output projection and feed-forward rest"
NOTHING = "nothing crosses from one segment to the next"
LEARNED = "the first segment reads learned vectors, which are part of the definition"
READS_ITS_OWN = "a token reads what it and those before it wrote, in the first segment, too"
FEEDBACK = {"empty": "a token attends the memory alone, not itself: without a memory there is no attention at all"}
