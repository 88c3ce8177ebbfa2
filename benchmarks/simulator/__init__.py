"""What exchanges of many ranks take, from costs measured on few. ../simulate.py runs it."""
