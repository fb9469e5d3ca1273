# Charge the account of a client with a quota, the twin of an account of kproxy.security.quotas, and count for metrics:
# twins of classes of kproxy.observe.tally and kproxy.observe.busiest.

cdef extern from *:
    """
    /* As in kproxy.security.quotas. */
    #define BURST_S 1.0
    #define LONGEST_WAIT_S 30.0
    #define MOST_BOUNDS 16
    #define MOST_USES 1000
    """
    const double BURST_S, LONGEST_WAIT_S
    const int MOST_BOUNDS, MOST_USES


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


@cython.final
cdef class Durations:
    """See kproxy.observe.tally.Durations."""

    # In this order few cache lines are touched: short times come first, and all histograms share their bounds.
    cdef const double *values
    cdef int bound_count
    cdef readonly double seconds
    cdef int64_t counts[MOST_BOUNDS + 1]
    cdef Limits limits

    def __init__(self, tuple bounds):
        self.limits = limits_of(bounds)
        self.values, self.bound_count = self.limits.values, len(bounds)

    @property
    def bounds(self):
        return self.limits.bounds

    @property
    def buckets(self):
        return [self.counts[at] for at in range(self.bound_count + 1)]

    def count(self, double elapsed, int64_t times=1):
        self.add(elapsed, times)

    cdef inline void add(self, double elapsed, int64_t times):
        cdef int at = 0
        self.seconds += elapsed * times
        while at < self.bound_count and self.values[at] < elapsed:
            at += 1
        self.counts[at] += times


@cython.final
cdef class Limits:
    """The bounds that many histograms have in common."""

    cdef double values[MOST_BOUNDS]
    cdef tuple bounds

    def __init__(self, tuple bounds):
        if len(bounds) > MOST_BOUNDS:
            raise ValueError(f"at most {MOST_BOUNDS} bounds")
        self.bounds = bounds
        for at, bound in enumerate(bounds):
            self.values[at] = bound


# There are few.
cdef dict _limits = {}


cdef Limits limits_of(tuple bounds):
    if bounds not in _limits:
        _limits[bounds] = Limits(bounds)
    return _limits[bounds]


cdef class Use:
    """See kproxy.observe.busiest.Use."""

    cdef public int64_t requests, received_bytes, sent_bytes, partition_bytes, lead
    cdef public int32_t partition
    cdef public bint is_over

    def __init__(self):
        self.partition = -1

    def write(self, int32_t partition_index, int64_t nbytes):
        self.add(partition_index, nbytes)

    cdef inline void add(self, int32_t partition_index, int64_t nbytes):
        self.received_bytes += nbytes
        if partition_index == self.partition:
            self.partition_bytes += nbytes
            self.lead += nbytes
        elif nbytes <= self.lead:
            self.lead -= nbytes
        else:
            self.partition, self.partition_bytes = partition_index, nbytes
            self.lead = nbytes - self.lead


cdef class BrokerCounts:
    """See kproxy.observe.tally.BrokerCounts."""

    cdef public int64_t sent_bytes, received_bytes, dials
    cdef readonly Durations produce, fetch
    cdef readonly object errors

    def __init__(self, tuple bounds):
        self.produce, self.fetch, self.errors = Durations(bounds), Durations(bounds), Counter()

    def answered(self, int api_key, double elapsed):
        if api_key == PRODUCE_KEY:
            self.produce.add(elapsed, 1)
        elif api_key == FETCH_KEY:
            self.fetch.add(elapsed, 1)


cdef class TopicUses:
    """Adds requests to the uses of their topics: `busiest` is a kproxy.observe.busiest.Busiest of topics."""

    cdef object busiest, topology
    # By the name or id in requests.
    cdef dict uses

    def __init__(self, busiest, topology):
        self.busiest, self.topology, self.uses = busiest, topology, {}

    cdef int add(self, CompiledSlot slot) except -1:
        cdef kp_topic *topic
        cdef uint32_t place, at
        cdef const uint8_t *data = slot.bytes()
        cdef Use use
        for place in range(slot.head.topic_count):
            topic = slot.topics + place
            wire = PyBytes_FromStringAndSize(<const char *>data + topic.name_start, topic.name_end - topic.name_start)
            found = self.uses.get(wire)
            if found is None or (<Use>found).is_over:
                if len(self.uses) >= MOST_USES:
                    self.uses.clear()
                name = self.topology.name_of(wire) if slot.head.version >= KP_TOPIC_IDS_FROM else wire
                found = self.uses[wire] = self.busiest.find(None if name is None else (name,))
            use = found
            use.requests += 1
            for at in range(topic.first, topic.first + topic.count):
                use.add(slot.entries[at].partition_index, slot.entries[at].end - slot.entries[at].start)
        return 0


cdef TopicUses topic_uses(context):
    """The uses for one client; None if topics are not counted."""
    return None if context.tally.topics is None else TopicUses(context.tally.topics, context.topology)
