"""What a run tells: metrics, stages and timelines, log files, trackers, the progress display and the summary."""
