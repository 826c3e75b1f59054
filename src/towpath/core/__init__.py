"""Pure decisions: values in, values out. No I/O, no clock, no threads; time, ids and chance arrive as
arguments."""
