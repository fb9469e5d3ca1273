package kproxy;

import java.time.Duration;
import java.util.*;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.header.internals.RecordHeader;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.apache.spark.TaskContext;
import org.apache.spark.api.java.function.ForeachPartitionFunction;
import org.apache.spark.sql.Row;

/**
 * Writes the rows of a task in one transaction, which commits the micro-batch's number too; `transactions.py` says why.
 *
 * A row has topic, partition, key, value, headers and a digest. Raw types: Janino, which compiles this, infers none.
 */
public class WriteInTransactions implements ForeachPartitionFunction {
    private Map settings;
    private String name;
    private long batch;
    private boolean writes;

    /** Tasks of `batch` are named `name` and their number. Without `writes` they only compare what they wrote before. */
    public WriteInTransactions of(Map settings, String name, long batch, boolean writes) {
        WriteInTransactions one = new WriteInTransactions();
        one.settings = new HashMap(settings);
        one.name = name;
        one.batch = batch;
        one.writes = writes;
        return one;
    }

    /** Fails unless the brokers have transactions for this name. */
    public void check() {
        begun(name).close(Duration.ofSeconds(30));
    }

    public void call(Iterator rows) throws Exception {
        // The first pass has compared: an earlier attempt had no rows either.
        if (writes && !rows.hasNext()) {
            return;
        }
        String task = name + "-" + TaskContext.getPartitionId();
        // From here on no earlier attempt can commit.
        KafkaProducer producer = begun(task);
        try {
            OffsetAndMetadata last = committed(task);
            if (last != null && last.offset() > batch) {
                throw new IllegalStateException("kproxy-later-batch|" + last.offset() + "|");
            }
            boolean isWritten = last != null && last.offset() == batch;
            if (!isWritten && !writes) {
                return;
            }
            if (!isWritten) {
                producer.beginTransaction();
            }
            long count = 0;
            long digest = 0;
            Set topics = new HashSet();
            while (rows.hasNext()) {
                Row row = (Row) rows.next();
                count++;
                digest += row.getLong(5);
                if (!isWritten) {
                    // A record that fails makes the commit fail.
                    producer.send(record(row));
                    topics.add(row.getString(0));
                }
            }
            OffsetAndMetadata done = new OffsetAndMetadata(batch, count + " rows " + Long.toHexString(digest));
            if (isWritten && !done.metadata().equals(last.metadata())) {
                throw new IllegalStateException("kproxy-other-rows|" + last + "|" + done + "|");
            }
            if (!isWritten) {
                Map commits = new HashMap();
                for (Object topic : topics) {
                    commits.put(new TopicPartition((String) topic, 0), done);
                }
                producer.sendOffsetsToTransaction(commits, new ConsumerGroupMetadata(task));
                producer.commitTransaction();
            }
        } finally {
            // Spark interrupts tasks of a job that has failed. An interrupted producer would leave its transaction open.
            Thread.interrupted();
            producer.close(Duration.ofSeconds(30));
        }
    }

    /** Ends the transaction that an earlier attempt has left open, and fences that attempt. */
    private KafkaProducer begun(String id) {
        Map all = new HashMap(settings);
        all.put("transactional.id", id);
        KafkaProducer producer = new KafkaProducer(all, new ByteArraySerializer(), new ByteArraySerializer());
        try {
            producer.initTransactions();
        } catch (RuntimeException error) {
            producer.close(Duration.ofSeconds(30));
            throw error;
        }
        return producer;
    }

    /** What the task committed last, null if nothing. Commits of a transaction that is still ending are awaited. */
    private OffsetAndMetadata committed(String group) throws Exception {
        OffsetAndMetadata last = null;
        AdminClient admin = AdminClient.create(settings);
        try {
            ListConsumerGroupOffsetsOptions stable = new ListConsumerGroupOffsetsOptions().requireStable(true);
            Map found = (Map) admin.listConsumerGroupOffsets(group, stable).partitionsToOffsetAndMetadata().get();
            for (Object each : found.values()) {
                OffsetAndMetadata one = (OffsetAndMetadata) each;
                last = one == null || (last != null && last.offset() >= one.offset()) ? last : one;
            }
        } finally {
            admin.close(Duration.ofSeconds(30));
        }
        return last;
    }

    private static ProducerRecord record(Row row) {
        List headers = new ArrayList();
        for (Object each : row.isNullAt(4) ? new ArrayList() : row.getList(4)) {
            headers.add(new RecordHeader(((Row) each).getString(0), (byte[]) ((Row) each).get(1)));
        }
        return new ProducerRecord(
            row.getString(0), (Integer) row.get(1), (byte[]) row.get(2), (byte[]) row.get(3), headers);
    }
}
