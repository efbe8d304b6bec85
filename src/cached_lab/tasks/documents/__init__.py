"""Documents of many segments, with a label each that is predicted at the end."""
