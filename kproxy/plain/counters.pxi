# Count in ctypes structures of Python, which read and change the same memory; and in arrays of histograms.

cdef extern from *:
    """
    #define MOST_USES 1000
    """
    const int MOST_USES


# The fields of a kproxy.proxy.memory_budget.Budget.
cdef struct kp_budget:
    int64_t held, arriving, limit


# Those of a kproxy.observe.tally.BrokerCounts.
cdef struct kp_traffic:
    int64_t sent_bytes, received_bytes


# Those of a kproxy.observe.tally.Tally.
cdef struct kp_tally:
    int64_t received_bytes
    int64_t produces[KP_MAX_VERSION + 1]


# Those of a kproxy.observe.busiest.Use.
cdef struct kp_use:
    int64_t requests, received_bytes, sent_bytes, partition, partition_bytes, lead, is_over


cdef void *fields_of(counted, tuple names, Py_ssize_t size) except NULL:
    """The memory of a structure with these fields, which stays where it is while the structure lives."""
    cdef Py_buffer memory
    if not isinstance(counted, Structure) or tuple([name for name, *_ in counted._fields_]) != names:
        raise TypeError(f"expected a structure of {names}; got {type(counted).__name__}")
    PyObject_GetBuffer(counted, &memory, PyBUF_WRITABLE)
    PyBuffer_Release(&memory)
    if memory.len != size:
        raise TypeError(f"expected a structure of {size} bytes; got {memory.len}")
    return memory.buf


cdef kp_budget *budget_of(budget) except NULL:
    return <kp_budget *>fields_of(budget, ("held", "arriving", "limit"), sizeof(kp_budget))


cdef kp_tally *tally_of(tally) except NULL:
    return <kp_tally *>fields_of(tally, ("received_bytes", "plain_produces"), sizeof(kp_tally))


cdef kp_traffic *traffic_of(counts) except NULL:
    return <kp_traffic *>fields_of(counts, ("sent_bytes", "received_bytes"), sizeof(kp_traffic))


cdef kp_use *use_of(use) except NULL:
    names = "requests", "received_bytes", "sent_bytes", "partition", "partition_bytes", "lead", "is_over"
    return <kp_use *>fields_of(use, names, sizeof(kp_use))


cdef inline void kp_vote(kp_use *use, int64_t partition_index, int64_t nbytes):
    """See kproxy.observe.busiest.Use.write."""
    use.received_bytes += nbytes
    if partition_index == use.partition:
        use.partition_bytes += nbytes
        use.lead += nbytes
    elif nbytes <= use.lead:
        use.lead -= nbytes
    else:
        use.partition, use.partition_bytes = partition_index, nbytes
        use.lead = nbytes - use.lead


cdef double *histogram_of(durations) except NULL:
    """The numbers of a kproxy.observe.tally.Durations: the sum, then each bound and its count; the last has no bound."""
    cdef array numbers = durations.numbers
    cdef Py_ssize_t size = 0 if numbers is None else len(numbers)
    if size < 3 or size % 2 == 0 or numbers.ob_descr.typecode != b"d" or numbers.data.as_doubles[size - 2] != INFINITY:
        raise TypeError("expected a histogram whose last bound is infinite")
    return numbers.data.as_doubles


cdef inline void count_time(double *histogram, double elapsed, int64_t times=1):
    histogram[0] += elapsed * times
    histogram += 1
    while histogram[0] < elapsed:
        histogram += 2
    histogram[1] += times


cdef class _KnownUse:
    """A kproxy.observe.busiest.Use and its fields."""

    cdef object owner
    cdef kp_use *fields

    def __cinit__(self, owner):
        self.owner, self.fields = owner, use_of(owner)


cdef class TopicUses:
    """Adds requests to the uses of their topics: `busiest` is a kproxy.observe.busiest.Busiest of topics."""

    cdef object busiest, topology
    # Their _KnownUse, by the name or id in requests.
    cdef dict uses

    def __init__(self, busiest, topology):
        self.busiest, self.topology, self.uses = busiest, topology, {}

    cdef int add(self, CompiledSlot slot) except -1:
        cdef kp_topic *topic
        cdef uint32_t place, at
        cdef const uint8_t *data = slot.bytes()
        cdef _KnownUse found
        for place in range(slot.head.topic_count):
            topic = slot.topics + place
            wire = PyBytes_FromStringAndSize(<const char *>data + topic.name_start, topic.name_end - topic.name_start)
            found = self.uses.get(wire)
            if found is None or found.fields.is_over:
                if len(self.uses) >= MOST_USES:
                    self.uses.clear()
                name = self.topology.name_of(wire) if slot.head.version >= KP_TOPIC_IDS_FROM else wire
                found = self.uses[wire] = _KnownUse(self.busiest.find(None if name is None else (name,)))
            found.fields.requests += 1
            for at in range(topic.first, topic.first + topic.count):
                kp_vote(found.fields, slot.entries[at].partition_index, slot.entries[at].end - slot.entries[at].start)
        return 0


cdef TopicUses topic_uses(context):
    """The uses for one client; None if topics are not counted."""
    return None if context.tally.topics is None else TopicUses(context.tally.topics, context.topology)
