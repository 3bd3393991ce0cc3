{#- Merger: what a model may say, checked, and which columns a merge writes. -#}

{% macro _merger(options, relation, types) %}
    {#- The checked options, the relation they are for, and the batch's columns. -#}
    {%- do lakehouse_patterns.require_pattern_options('merger', options) -%}
    {%- set names = {} -%}
    {%- for option, given in {
        'key': config.get('unique_key'),
        'partitions': config.get('partition_by'),
        'nullable_key': options.get('nullable_key'),
        'sequence': options.get('sequence'),
        'keep_on_null': options.get('keep_on_null'),
        'is_deleted': options.get('is_deleted'),
        'prune_by': options.get('prune_by')
    }.items() -%}
        {%- do names.update({
            option: lakehouse_patterns.spelled_names(types, lakehouse_patterns.as_list(given))
        }) -%}
    {%- endfor -%}
    {%- set key, partitions = names.key, names.partitions -%}
    {%- set merger = {
        'relation': relation,
        'types': types,
        'partitions': partitions,
        'key': key,
        'nullable_key': names.nullable_key,
        'on_null_key': options.get('on_null_key', 'fail'),
        'sequence': names.sequence,
        'deletes': options.get('deletes', 'none'),
        'is_deleted': names.is_deleted[0] if names.is_deleted else none,
        'keep_on_null': names.keep_on_null,
        'prune_by': names.prune_by if 'prune_by' in options else partitions | select('in', key) | list
    } -%}

    {%- do lakehouse_patterns.require(
        key | length > 0, 'meta.lakehouse_patterns.merger needs unique_key: the column or columns that never change'
    ) -%}
    {%- do lakehouse_patterns.require_one_of('deletes', merger.deletes, ['none', 'soft', 'hard']) -%}
    {%- do lakehouse_patterns.require_one_of('on_null_key', merger.on_null_key, ['fail', 'quarantine']) -%}
    {%- do lakehouse_patterns.require(
        merger.on_null_key == 'fail' or lakehouse_patterns.required_columns(merger),
        'on_null_key: quarantine has nothing to quarantine: every key column is under nullable_key, no sequence is given'
    ) -%}
    {%- do lakehouse_patterns.require(
        (merger.deletes == 'none') == (merger.is_deleted is none),
        "deletes: soft and deletes: hard need is_deleted, and is_deleted needs one of them; got deletes: "
        ~ merger.deletes ~ " and is_deleted: " ~ merger.is_deleted
    ) -%}
    {%- for option, names, allowed in [
        ('nullable_key', merger.nullable_key, key), ('prune_by', merger.prune_by, partitions)
    ] -%}
        {%- for name in names -%}
            {%- do lakehouse_patterns.require(
                name in allowed,
                option ~ " may name only columns of " ~ ('unique_key' if option == 'nullable_key' else 'partition_by')
                ~ " (" ~ (allowed | join(', ')) ~ "), got '" ~ name ~ "'"
            ) -%}
        {%- endfor -%}
    {%- endfor -%}
    {%- set own = key + merger.sequence + ([merger.is_deleted] if merger.is_deleted else []) -%}
    {%- do lakehouse_patterns.require_columns(types, own + merger.prune_by + merger.keep_on_null) -%}
    {%- do lakehouse_patterns.require_sortable(types, key, 'unique_key') -%}
    {%- do lakehouse_patterns.require_sortable(types, merger.sequence, 'sequence') -%}
    {%- for name in merger.prune_by -%}
        {%- do lakehouse_patterns.require(
            lakehouse_patterns._merger_literal(name, merger.types[name]),
            "prune_by may not name a column of type " ~ merger.types[name] ~ ", got '" ~ name ~ "'"
        ) -%}
    {%- endfor -%}
    {%- for name in merger.keep_on_null -%}
        {%- do lakehouse_patterns.require(
            name not in own,
            "keep_on_null is for attributes; '" ~ name ~ "' is part of unique_key, sequence or is_deleted"
        ) -%}
    {%- endfor -%}
    {%- do lakehouse_patterns.require(
        not merger.keep_on_null or merger.deletes != 'hard',
        'keep_on_null needs deletes: none or deletes: soft: of a row that was removed there is nothing to keep'
    ) -%}
    {%- if merger.is_deleted -%}
        {%- do lakehouse_patterns.require_boolean(types, 'is_deleted', merger.is_deleted) -%}
    {%- endif -%}
    {{ return(merger) }}
{% endmacro %}


{% macro _merger_written_columns(merger, target, stored) %}
    {#-
        The columns that a merge inserts and updates: those of the target, so that the batch follows the target's
        schema and not a second column list. Values are cast as Delta stores them: an overflow or a text that is no
        number fails the run, in either ANSI mode.
    -#}
    {%- set differences = lakehouse_patterns.schema_differences(stored, merger.types) -%}
    {%- set missing = differences.absent -%}
    {%- do lakehouse_patterns.require(
        not missing or config.get('on_schema_change') == 'append_new_columns',
        target ~ ' has columns that the model lacks: ' ~ (missing | join(', '))
        ~ "; they stay as they are with on_schema_change='append_new_columns'"
    ) -%}
    {%- set inserted = lakehouse_patterns.spelled_names(
        merger.types, lakehouse_patterns.names_without_case(stored, missing)
    ) -%}
    {%- for name in merger.key + merger.sequence + ([merger.is_deleted] if merger.is_deleted else []) -%}
        {%- do lakehouse_patterns.require(
            name in inserted,
            target ~ " has no column '" ~ name ~ "': run the model with on_schema_change='append_new_columns' "
            ~ "or with --full-refresh"
        ) -%}
    {%- endfor -%}

    {%- set updated = lakehouse_patterns._merger_updated_columns(target, inserted) -%}
    {%- for name in merger.sequence + ([merger.is_deleted] if merger.deletes == 'soft' else []) -%}
        {%- do lakehouse_patterns.require(
            name in updated,
            "merge_update_columns and merge_exclude_columns must leave '" ~ name
            ~ "' updated: without it later changes are compared with an old state"
        ) -%}
    {%- endfor -%}
    {{ return({'inserted': inserted, 'updated': updated}) }}
{% endmacro %}


{% macro _merger_updated_columns(target, inserted) %}
    {#- As dbt reads the two configs; a column that the model does not select has nothing to be updated with. -#}
    {%- set only = lakehouse_patterns.as_list(config.get('merge_update_columns')) | map('replace', '`', '') | list -%}
    {%- set without = lakehouse_patterns.as_list(config.get('merge_exclude_columns')) -%}
    {%- do lakehouse_patterns.require(
        not (only and without), 'a model takes merge_update_columns or merge_exclude_columns, got both'
    ) -%}
    {%- for name in lakehouse_patterns.names_without_case(only, inserted) -%}
        {%- do lakehouse_patterns.require(
            false,
            "merge_update_columns has '" ~ name ~ "', which is not in both the model and " ~ target ~ '; in both are: '
            ~ (inserted | join(', '))
        ) -%}
    {%- endfor -%}
    {%- if only -%}
        {{ return(lakehouse_patterns.spelled_names(inserted, only)) }}
    {%- endif -%}
    {{ return(lakehouse_patterns.names_without_case(inserted, without)) }}
{% endmacro %}
