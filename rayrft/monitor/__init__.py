"""Monitoring: records, sinks, the bottleneck verdict, console lines and the plot."""
