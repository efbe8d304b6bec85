"""Documents of many segments, each with a label, which is told when all has been read."""
