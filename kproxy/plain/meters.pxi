# Charge the account of a client with a quota: the twins of kproxy.security.quotas and kproxy.proxy.metering.

cdef extern from *:
    """
    /* As in kproxy.security.quotas. */
    #define BURST_S 1.0
    #define LONGEST_WAIT_S 30.0
    /* As in kproxy.proxy.metering. */
    #define CLIENT_ID_AT 12
    """
    const double BURST_S, LONGEST_WAIT_S
    const Py_ssize_t CLIENT_ID_AT


cdef class Bucket:
    """See kproxy.security.quotas.Bucket."""

    cdef readonly double rate, usual
    cdef double at
    cdef public double level, used

    def __init__(self, double rate):
        self.rate = self.usual = rate

    def use(self, double amount, double now):
        return self.take(amount, now)

    def set_rate(self, double rate, double now):
        self.take(0.0, now)
        self.level += (rate - self.rate) * BURST_S
        if not self.level > 0.0:
            self.level = 0.0
        self.rate = rate

    cdef double take(self, double amount, double now):
        cdef double leaked = (now - self.at if now > self.at else 0.0) * self.rate, wait
        self.level = (self.level - leaked if self.level > leaked else 0.0) + amount
        self.used += amount
        self.at = now
        wait = (self.level - self.rate * BURST_S) / (self.rate if self.rate > self.usual else self.usual)
        return wait if wait > 0.0 else 0.0


cdef class Account:
    """See kproxy.security.quotas.Account."""

    cdef readonly Bucket produced, fetched, requests
    cdef public bint is_shared
    cdef object __weakref__

    def __init__(self, produced, fetched, requests):
        self.produced = None if produced is None else Bucket(produced)
        self.fetched = None if fetched is None else Bucket(fetched)
        self.requests = None if requests is None else Bucket(requests)

    def use(self, double now, *, int64_t produced, int64_t fetched):
        return self.take(now, produced, fetched)

    cdef double take(self, double now, int64_t produced, int64_t fetched):
        cdef double wait = 0.0, more
        if self.requests is not None:
            wait = self.requests.take(1.0, now)
        if self.produced is not None and produced:
            more = self.produced.take(produced, now)
            wait = more if more > wait else wait
        if self.fetched is not None and fetched:
            more = self.fetched.take(fetched, now)
            wait = more if more > wait else wait
        return wait if wait < LONGEST_WAIT_S else LONGEST_WAIT_S

    def wait(self, double now):
        cdef double wait = 0.0, more
        for bucket in (self.produced, self.fetched, self.requests):
            if bucket is not None:
                more = (<Bucket>bucket).take(0.0, now)
                wait = more if more > wait else wait
        return wait if wait < LONGEST_WAIT_S else LONGEST_WAIT_S

    def is_active(self, double now):
        cdef bint active = False
        for bucket in (self.produced, self.fetched, self.requests):
            if bucket is not None:
                (<Bucket>bucket).take(0.0, now)
                active = active or (<Bucket>bucket).used > 0.0 or (<Bucket>bucket).level > 0.0
        return active


cdef class Charging:
    """See kproxy.proxy.metering.Charging."""

    cdef public Account _account, _of_named
    cdef public bint _names_clients
    cdef public bytes _named
    cdef public int64_t _sent_bytes
    cdef AnswerOrder answers
    cdef Clock clock

    def __init__(self, AnswerOrder answers, clock):
        self.answers, self.clock = answers, clock_of(clock)

    def take(self, frame, double first_byte_at):
        return self.take_span(frame, data_of(frame), 0, len(frame), self.clock.now(), first_byte_at)

    cdef bint take_span(
        self, view, const uint8_t *chunk, Py_ssize_t start, Py_ssize_t size, double now, double first_byte_at
    ) except -1:
        """Like `take`, for a frame in `view`, whose bytes are at `chunk`; `now` is the time of the event."""
        cdef const uint8_t *data = chunk + start
        cdef Account account = self._account
        cdef PacedOutbox outbox
        cdef int64_t fetched = 0
        cdef double wait
        if self._names_clients:
            account = self._of_named if self.is_named(data, size) else self._account_of(view[start:start + size])
        if account is None:
            return False
        outbox = self.answers.outbox
        if outbox is not None:
            fetched, self._sent_bytes = outbox.written_bytes - self._sent_bytes, outbox.written_bytes
        wait = account.take(now, size if size >= 6 and kp_int16(data + 4) == PRODUCE_KEY else 0, fetched)
        if wait > 0.0:
            self._throttle(view[start:start + size], first_byte_at, account, wait)
            return True
        return False

    cdef inline bint is_named(self, const uint8_t *data, Py_ssize_t size):
        """Whether a request has the client id that is kept."""
        cdef Py_ssize_t length
        if self._named is None:
            return False
        length = PyBytes_GET_SIZE(self._named)
        return size >= CLIENT_ID_AT + length and not memcmp(data + CLIENT_ID_AT, PyBytes_AS_STRING(self._named), length)
