# Write the answers of a client in the order of its requests: the twin of kproxy.proxy.answer_order; and the counters
# that requests add to, twins of kproxy.proxy.memory_budget.HeldBytes and kproxy.observe.tally.ProduceCounts.

cdef extern from *:
    """
    #include <time.h>
    static inline double kp_monotonic(void) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    }
    #if defined(__linux__)
    #define KP_HAS_MONOTONIC 1
    #else
    #define KP_HAS_MONOTONIC 0
    #endif
    """
    double kp_monotonic() nogil
    const bint KP_HAS_MONOTONIC


cdef class Clock:
    """The proxy's clock, in seconds; Python's own monotonic one is read without a call of Python."""

    cdef object clock
    cdef bint is_monotonic

    def __init__(self, clock):
        self.clock = clock
        self.is_monotonic = KP_HAS_MONOTONIC and clock is monotonic

    cdef inline double now(self):
        if self.is_monotonic:
            return kp_monotonic()
        return <double>self.clock()


cdef Clock _usual_clock = Clock(monotonic)


cdef Clock clock_of(clock):
    """The `Clock` of a clock: all parts of all connections have the same one of Python's monotonic clock."""
    return _usual_clock if clock is monotonic else Clock(clock)


cdef class HeldBytes:
    """See kproxy.proxy.memory_budget.HeldBytes."""

    cdef public int64_t held, arriving, limit
    cdef public object waiting, passing


cdef class ProduceCounts:
    """See kproxy.observe.tally.ProduceCounts."""

    cdef public int64_t received_bytes, sent_bytes, plain_requests
    cdef readonly Durations produce, broker, order, writing
    cdef Durations own_reading, own_queue
    # Requests that came in one read and were sent at once, which are not in these two yet.
    cdef int64_t at_once
    cdef object counted
    cdef int key_shift
    # Produce requests by version that are not in `counted` yet.
    cdef int64_t produces[KP_MAX_VERSION + 1]

    def __init__(self, requests, int key_shift, tuple bounds):
        self.counted, self.key_shift = requests, key_shift
        self.produce, self.own_reading, self.own_queue = Durations(bounds), Durations(bounds), Durations(bounds)
        self.broker, self.order, self.writing = Durations(bounds), Durations(bounds), Durations(bounds)

    @property
    def requests(self):
        cdef int version
        for version in range(KP_MAX_VERSION + 1):
            if self.produces[version]:
                self.counted[PRODUCE_KEY << self.key_shift | version] += self.produces[version]
                self.produces[version] = 0
        return self.counted

    cdef inline void produced(self, int version):
        self.produces[version] += 1
        self.plain_requests += 1

    @property
    def reading(self):
        self.count_at_once()
        return self.own_reading

    @property
    def queue(self):
        self.count_at_once()
        return self.own_queue

    cdef int count_at_once(self) except -1:
        self.own_reading.add(0.0, self.at_once)
        self.own_queue.add(0.0, self.at_once)
        self.at_once = 0
        return 0

    def answered(self, Slot slot, double now):
        self.count(slot, now)

    cdef inline void count(self, Slot slot, double now):
        self.produce.add(now - slot.began, 1)
        if slot.sent_at == slot.began:
            self.at_once += 1
            self.broker.add(slot.answered_at - slot.sent_at, 1)
        else:
            self.own_reading.add(slot.taken_at - slot.began, 1)
            if slot.sent_at:
                self.own_queue.add(slot.sent_at - slot.taken_at, 1)
                self.broker.add(slot.answered_at - slot.sent_at, 1)
            else:
                self.own_queue.add(slot.answered_at - slot.taken_at, 1)
        self.order.add(now - slot.answered_at, 1)


cdef class Slot:
    """See kproxy.proxy.answer_order.Slot. The answer may also be a span of a receive buffer."""

    cdef readonly AnswerOrder order
    cdef readonly int64_t sequence
    cdef public int64_t weight, frame_bytes
    cdef public double began, taken_at, sent_at, answered_at
    cdef public list buffers
    cdef public object is_allowed
    cdef object answer_view
    cdef Py_ssize_t answer_start, answer_end

    def __init__(self, AnswerOrder order, int64_t sequence, int64_t weight, double began):
        self.order, self.sequence = order, sequence
        self.weight = self.frame_bytes = weight
        self.began = began
        if began:
            self.taken_at = order.clock.now()

    def fill(self, list buffers, is_allowed=None):
        if buffers:
            if self.began:
                self.answered_at = self.order.clock.now()
            self.buffers, self.is_allowed = buffers, is_allowed
            self.order.write_ready()
        else:
            self.order.unload(self)

    cdef int fill_span(self, view, Py_ssize_t start, Py_ssize_t end, double answered_at) except -1:
        """Like `fill`, with [start, end) of `view`."""
        self.answer_view, self.answer_start, self.answer_end = view, start, end
        self.answered_at = answered_at
        return self.order.write_ready()


cdef class AnswerOrder:
    """See kproxy.proxy.answer_order.AnswerOrder."""

    cdef HeldBytes budget
    cdef ProduceCounts tally
    cdef Clock clock
    cdef object client
    cdef public PacedOutbox outbox
    cdef readonly list slots
    cdef public int64_t sequence, silent, in_flight_bytes
    cdef public bint is_waited_for

    def __init__(self, context, client):
        self.clock = clock_of(context.clock)
        self.tally, self.budget = context.tally, context.budget
        self.client = client
        self.slots = []

    @property
    def open_count(self):
        return len(self.slots) + self.silent

    def flush(self):
        self.write_ready()

    def handed_over(self, int64_t sequence):
        cdef Slot slot
        cdef Py_ssize_t low = 0, high = len(self.slots), middle
        while low < high:
            middle = (low + high) // 2
            slot = self.slots[middle]
            if slot.sequence < sequence:
                low = middle + 1
            else:
                high = middle
        if low < len(self.slots):
            slot = self.slots[low]
            if slot.sequence == sequence and slot.began:
                slot.sent_at = self.clock.now()

    cdef int write_ready(self) except -1:
        """Write every answer whose turn has come."""
        cdef Slot slot
        cdef double now = 0.0
        cdef int64_t count = 0
        cdef HeldBytes budget = self.budget
        cdef list slots = self.slots
        while self.outbox is not None and slots:
            slot = slots[0]
            if slot.answer_view is None and slot.buffers is None:
                break
            if slot.is_allowed is not None and not slot.is_allowed():
                self.client.forbidden()
                return 0
            del slots[0]
            self.in_flight_bytes -= slot.weight
            budget.held -= slot.frame_bytes
            if slot.began:
                if not now:
                    now = self.clock.now()
                self.tally.count(slot, now)
                count += 1
            if slot.answer_view is not None:
                self.outbox.put_span(slot.answer_view, slot.answer_start, slot.answer_end)
            else:
                self.outbox.put(slot.buffers)
        if self.outbox is None:
            return 0
        if count:
            self.outbox.add_run(count, now)
        if budget.waiting:
            budget.wake()
        if self.is_waited_for:
            self.client.go_on()
        return 0

    def unload(self, Slot slot):
        self.in_flight_bytes -= slot.weight
        self.budget.held -= slot.frame_bytes
        slot.frame_bytes = 0
        self.silent -= 1
        if self.budget.waiting:
            self.budget.wake()
        if self.is_waited_for:
            self.client.go_on()

    def let_go(self):
        cdef int64_t held = 0
        cdef Slot slot
        for slot in self.slots:
            held += slot.frame_bytes
            slot.frame_bytes = 0
        self.slots.clear()
        return held
