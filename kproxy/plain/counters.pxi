# Count in arrays that Python objects keep (kproxy.plain.numbers), and that they read and change as well.

cdef extern from *:
    """
    #define MOST_USES 1000
    """
    const int MOST_USES


# The numbers of a kproxy.proxy.memory_budget.Budget.
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


cdef inline void *numbers_of(array numbers, size_t size) except NULL:
    """The numbers of an array of 64-bit integers, which are `size` bytes."""
    if numbers is None or numbers.ob_descr.itemsize != sizeof(int64_t) or <size_t>len(numbers) * sizeof(int64_t) != size:
        raise TypeError(f"{size} bytes of 64-bit integers are expected")
    return numbers.data.as_voidptr


cdef inline kp_budget *budget_of(budget) except NULL:
    return <kp_budget *>numbers_of(budget.numbers, sizeof(kp_budget))


cdef inline kp_tally *tally_of(tally) except NULL:
    return <kp_tally *>numbers_of(tally.numbers, sizeof(kp_tally))


cdef inline kp_use *use_of(array numbers) except NULL:
    return <kp_use *>numbers_of(numbers, sizeof(kp_use))


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
        raise TypeError("a histogram whose last bound is infinite is expected")
    return numbers.data.as_doubles


cdef inline void count_time(double *histogram, double elapsed, int64_t times=1):
    histogram[0] += elapsed * times
    histogram += 1
    while histogram[0] < elapsed:
        histogram += 2
    histogram[1] += times


cdef class TopicUses:
    """Adds requests to the uses of their topics: `busiest` is a kproxy.observe.busiest.Busiest of topics."""

    cdef object busiest, topology
    # The numbers of their uses, by the name or id in requests.
    cdef dict uses

    def __init__(self, busiest, topology):
        self.busiest, self.topology, self.uses = busiest, topology, {}

    cdef int add(self, CompiledSlot slot) except -1:
        cdef kp_topic *topic
        cdef uint32_t place, at
        cdef const uint8_t *data = slot.bytes()
        cdef kp_use *use
        for place in range(slot.head.topic_count):
            topic = slot.topics + place
            wire = PyBytes_FromStringAndSize(<const char *>data + topic.name_start, topic.name_end - topic.name_start)
            found = self.uses.get(wire)
            if found is None or use_of(found).is_over:
                if len(self.uses) >= MOST_USES:
                    self.uses.clear()
                name = self.topology.name_of(wire) if slot.head.version >= KP_TOPIC_IDS_FROM else wire
                found = self.uses[wire] = self.busiest.find(None if name is None else (name,)).numbers
            use = use_of(found)
            use.requests += 1
            for at in range(topic.first, topic.first + topic.count):
                kp_vote(use, slot.entries[at].partition_index, slot.entries[at].end - slot.entries[at].start)
        return 0


cdef TopicUses topic_uses(context):
    """The uses for one client; None if topics are not counted."""
    return None if context.tally.topics is None else TopicUses(context.tally.topics, context.topology)
