"""The load generator behind `octavo bench`.

workload says what is sent when, targets send it, measure keeps what came back and does
the arithmetic, report shows it. Nothing here knows how the server works.
"""
