"""Reports of load tests: what to say (model.py), and its forms: terminal, HTML with charts, JSON and CSV files.

Owns: nothing itself. Runs in: load tool. Must not know: how requests are sent or figures computed.

A study builds a `model.Report`; then
    terminal.print_report(report, console)                  a rich Console
    files.save_json(report, path, with_records=True)        files.load_report(path) reads it back
    files.save_csv(report, path)                            a line for each result
    files.save_requests_csv(report, path)                   a line for each request
    html.save_html(report, path)                            one self-contained page; needs matplotlib
"""
