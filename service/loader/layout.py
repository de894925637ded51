"""The arrangement of weights in a segment. Another name stands for an arrangement that older programs cannot read."""

LAYOUT = "plain"
