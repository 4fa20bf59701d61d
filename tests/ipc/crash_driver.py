"""Runs a producer and a consumer process on one ring and kills either at random points; checks what arrives.

python crash_driver.py MODE SECONDS SEED      MODE: producer, consumer or both (who is killed). Prints a JSON summary.
Forks without exec, hundreds of times a second, which is why it is a program of its own and not part of the test process.
"""

import itertools
import json
import mmap
import os
import random
import signal
import sys
import time

from headrace.ipc.ring import Ring

MAX_LIVES = 100_000
MAX_LOG = 4_000_000


def record_of(life, number):
    """A record whose every byte is known from its first 16."""
    size = (number * 7919 + life * 104729) % 700
    return life.to_bytes(8, "little") + number.to_bytes(8, "little") + bytes([(life + number) & 0xFF]) * size


def produce(buffer, confirmed, life):
    ring = Ring.attach(buffer)
    number = 0
    while True:
        record = record_of(life, number)
        while not ring.try_push(record):
            time.sleep(0)
        number += 1
        confirmed[life] = number


def consume(buffer, log, state):
    """Log (life, number) of each record; state: [log length, records that were torn, whether to end when empty]."""
    ring = Ring.attach(buffer)
    while True:
        record = ring.try_pop()
        if record is None:
            if state[2] and not ring.has_records:
                return
            time.sleep(0)
            continue
        life, number = int.from_bytes(record[:8], "little"), int.from_bytes(record[8:16], "little")
        if record != record_of(life, number):
            state[1] += 1
        log[state[0]] = life << 32 | number
        state[0] += 1


def start(function, *arguments):
    pid = os.fork()
    if pid:
        return pid
    try:
        function(*arguments)
    finally:
        os._exit(0)


def stop(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def run(mode, seconds, seed):
    chance = random.Random(seed)
    buffer = mmap.mmap(-1, Ring.size_bytes(4096))
    Ring.create(buffer)
    shared = [mmap.mmap(-1, 8 * count) for count in (MAX_LIVES, MAX_LOG, 3)]
    confirmed, log, state = (memoryview(memory).cast("Q") for memory in shared)
    life = num_producer_kills = num_consumer_kills = 0
    producer, consumer = start(produce, buffer, confirmed, life), start(consume, buffer, log, state)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(chance.choice([0, chance.random() * 0.002, chance.random() * 0.01]))
        if mode == "producer" or (mode == "both" and chance.random() < 0.5):
            stop(producer)
            num_producer_kills += 1
            life += 1
            producer = start(produce, buffer, confirmed, life)
        else:
            stop(consumer)
            num_consumer_kills += 1
            consumer = start(consume, buffer, log, state)
    stop(producer)
    state[2] = 1
    os.waitpid(consumer, 0)
    delivered = [(entry >> 32, entry & 0xFFFFFFFF) for entry in log[: state[0]]]
    return {
        "num_producer_kills": num_producer_kills,
        "num_consumer_kills": num_consumer_kills,
        "num_delivered": len(delivered),
        "num_torn": state[1],
        "num_left": Ring.attach(buffer).statistics().fill_bytes,
        **compare(delivered, [confirmed[index] for index in range(life + 1)]),
    }


def compare(delivered, confirmed):
    """Disorder and repetition in what was delivered, and what is missing of what was published."""
    num_disordered = sum(second <= first for first, second in itertools.pairwise(delivered))
    last = dict(delivered)  # the highest number of each life, in order of delivery
    # A life may have published one record more than it could confirm before it was killed.
    num_invented = sum(number > confirmed[life] for life, number in last.items())
    num_published = sum(max(count, last.get(life, -1) + 1) for life, count in enumerate(confirmed))
    return {
        "num_disordered": num_disordered,
        "num_invented": num_invented,
        "num_missing": num_published - len(set(delivered)),
        "num_repeated": len(delivered) - len(set(delivered)),
    }


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))))
