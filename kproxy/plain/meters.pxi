# Charge the account of a client with a quota: the twin of an account of kproxy.security.quotas.

cdef extern from *:
    """
    /* As in kproxy.security.quotas. */
    #define BURST_S 1.0
    #define LONGEST_WAIT_S 30.0
    """
    const double BURST_S, LONGEST_WAIT_S


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
