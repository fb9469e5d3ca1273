import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.PrintStream;
import java.util.ArrayList;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.ExecutionException;

import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;

/**
 * Producers that keep one record each in flight until the standard input ends, on any kafka-clients from 0.11 on.
 *
 * Arguments: TOPIC, RECORDS of a transaction (0: none), PAUSE between records in ms, WRITERS, for each of these
 * BOOTSTRAP PARTITION, and the settings of all as name=value. Values are "0", "1" and so on. A line is printed, with
 * the partition first, as soon as something happens: "PARTITION ack NUMBER OFFSET", "PARTITION error NUMBER WHAT",
 * "PARTITION commit" and "PARTITION abort". Written for Janino, as JavaClient is.
 */
public final class SteadyClient implements Runnable {
    private static volatile boolean ended = false;
    private static PrintStream out;

    private final String topic;
    private final int inTransaction;
    private final long pauseMs;
    private final int partition;
    private final Properties settings;
    private int number = 0;

    private SteadyClient(String topic, int inTransaction, long pauseMs, int partition, Properties settings) {
        this.topic = topic;
        this.inTransaction = inTransaction;
        this.pauseMs = pauseMs;
        this.partition = partition;
        this.settings = settings;
    }

    public static void main(String[] arguments) throws Exception {
        out = new PrintStream(new FileOutputStream(FileDescriptor.out), true, "US-ASCII");
        int writers = Integer.parseInt(arguments[3]);
        List threads = new ArrayList();
        for (int i = 0; i < writers; i++) {
            Properties settings = new Properties();
            settings.put("bootstrap.servers", arguments[4 + 2 * i]);
            settings.put("key.serializer", "org.apache.kafka.common.serialization.ByteArraySerializer");
            settings.put("value.serializer", "org.apache.kafka.common.serialization.ByteArraySerializer");
            int partition = Integer.parseInt(arguments[5 + 2 * i]);
            int inTransaction = Integer.parseInt(arguments[1]);
            if (inTransaction > 0) {
                settings.put("transactional.id", arguments[0] + "-" + partition);
            }
            for (int j = 4 + 2 * writers; j < arguments.length; j++) {
                int equals = arguments[j].indexOf('=');
                settings.put(arguments[j].substring(0, equals), arguments[j].substring(equals + 1));
            }
            long pauseMs = Long.parseLong(arguments[2]);
            Thread thread = new Thread(new SteadyClient(arguments[0], inTransaction, pauseMs, partition, settings));
            threads.add(thread);
            thread.start();
        }
        while (System.in.read() >= 0) {
            continue;
        }
        ended = true;
        for (int i = 0; i < threads.size(); i++) {
            ((Thread) threads.get(i)).join();
        }
    }

    public void run() {
        try {
            KafkaProducer producer = new KafkaProducer(settings);
            if (inTransaction > 0) {
                producer.initTransactions();
            }
            while (!ended) {
                if (inTransaction > 0) {
                    transact(producer);
                } else {
                    send(producer);
                }
            }
            producer.close();
        } catch (Throwable failure) {
            say("error " + number + " " + failure);
        }
    }

    private void transact(KafkaProducer producer) throws Exception {
        try {
            producer.beginTransaction();
            boolean whole = true;
            for (int i = 0; i < inTransaction && whole; i++) {
                whole = send(producer);
            }
            if (whole) {
                producer.commitTransaction();
                say("commit");
                return;
            }
        } catch (RuntimeException failure) {
            say("error " + number + " " + failure);
        }
        producer.abortTransaction();
        say("abort");
    }

    /** Whether the record was acknowledged. */
    private boolean send(KafkaProducer producer) throws Exception {
        byte[] value = String.valueOf(number).getBytes("US-ASCII");
        try {
            ProducerRecord record = new ProducerRecord(topic, Integer.valueOf(partition), null, value);
            RecordMetadata placed = (RecordMetadata) producer.send(record).get();
            say("ack " + number + " " + placed.offset());
            return true;
        } catch (ExecutionException failure) {
            say("error " + number + " " + failure.getCause());
            return false;
        } finally {
            number++;
            Thread.sleep(pauseMs);
        }
    }

    private void say(String what) {
        out.println(partition + " " + what.replace('\n', ' '));
    }
}
