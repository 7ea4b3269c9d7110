"""What every test starts from: signals that reach the programs it starts."""

import signal

for name, handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
    number = getattr(signal, name, None)  # Windows has no SIGHUP
    # Ignored under nohup and in the background of a script, which programs that a test starts would inherit.
    if number is not None and signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)
