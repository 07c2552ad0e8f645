"""What a person sees: records, sinks, the bottleneck verdict, progress lines, the plot."""
